package admit

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
)

// Addrs returns the addresses for the tickets of a server that listens at an address: those of all network interfaces if the listener
// is open to all. The list advertise takes their place, if it is not empty: HOST, or HOST:PORT where a port of another number leads here.
func Addrs(listener net.Addr, advertise []string) ([]string, error) {
	at, err := netip.ParseAddrPort(listener.String())
	if err != nil {
		return nil, fmt.Errorf("admit: addresses of %v: %w", listener, err)
	}
	nets, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("admit: addresses of this machine: %w", err)
	}
	var machine []netip.Addr
	for _, n := range nets {
		if p, err := netip.ParsePrefix(n.String()); err == nil {
			machine = append(machine, p.Addr())
		}
	}
	offered := offer(at, machine, advertise)
	if err := checkAddrs(offered); err != nil {
		return nil, fmt.Errorf("admit: %w", err)
	}
	return offered, nil
}

// offer chooses the addresses of a listener among those of a machine: no link-local ones, which mean something else elsewhere, and
// loopback only if there is nothing else.
func offer(at netip.AddrPort, machine []netip.Addr, advertise []string) (offered []string) {
	port := strconv.Itoa(int(at.Port()))
	if len(advertise) > 0 {
		for _, a := range advertise {
			if ip, err := netip.ParseAddr(a); err == nil {
				a = netip.AddrPortFrom(ip, at.Port()).String()
			} else if _, _, err := net.SplitHostPort(a); err != nil {
				a = net.JoinHostPort(a, port)
			}
			offered = append(offered, a)
		}
		return offered
	}
	own := at.Addr().Unmap()
	if !own.IsUnspecified() {
		return []string{netip.AddrPortFrom(own, at.Port()).String()}
	}
	var usual, loopback []string
	for _, ip := range machine {
		ip = ip.Unmap()
		if own.Is4() && !ip.Is4() { // a listener at :: takes both
			continue
		}
		a := netip.AddrPortFrom(ip, at.Port()).String()
		switch {
		case ip.IsLoopback():
			loopback = append(loopback, a)
		case ip.IsGlobalUnicast() && !slices.Contains(usual, a):
			usual = append(usual, a)
		}
	}
	if len(usual) == 0 {
		usual = loopback
	}
	return usual[:min(len(usual), MaxAddrs)]
}

// OneFamily returns the addresses of one version of IP, of version 4 if there are any: members of the gossip ring and workers use the
// address over which their machine has joined, and those of one version do not reach the other.
func OneFamily(addrs []string) []string {
	var of4 []string
	for _, a := range addrs {
		if ip, err := netip.ParseAddrPort(a); err == nil && ip.Addr().Is4() {
			of4 = append(of4, a)
		}
	}
	if len(of4) > 0 {
		return of4
	}
	return addrs
}
