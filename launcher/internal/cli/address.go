package cli

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/net/admit"
)

// maxName bounds the name of a machine, as DNS does.
const maxName = 253

// Address is the error of a flag whose value is no address to listen on, nil for another value.
func Address(flag, addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil || len(host) > maxName || faults.Value(host) != host && host != "" {
		return fmt.Errorf("--%s=%s: give HOST:PORT or :PORT", flag, faults.Value(addr))
	}
	return nil
}

// Reachable are the errors of --advertise, the addresses at which others reach this machine. The first is that of its workers.
func Reachable(addrs []string) (errs faults.List) {
	errs.If(len(addrs) > admit.MaxAddrs, "--advertise: %d addresses are named: give at most %d", len(addrs), admit.MaxAddrs)
	for i, a := range addrs[:min(len(addrs), admit.MaxAddrs)] {
		host, _, err := net.SplitHostPort(a)
		if err != nil {
			host = a
		}
		ip, err := netip.ParseAddr(host)
		name := i > 0 && host != "" && len(host) <= maxName && faults.Value(host) == host
		errs.If(err != nil && !name || err == nil && ip.IsUnspecified(), "--advertise %s: give the IP address at which other machines reach this one", faults.Value(a))
	}
	return errs
}
