package ssh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/user"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/soliton-train/soliton/internal/timing"
)

// Host is a machine as people give it: HOST[:N].
type Host struct {
	Name    string // for ssh: a name that its configuration knows, or USER@HOST
	Workers int    // 0 for as many as elsewhere
}

// MaxHosts is the most machines that a list names.
const MaxHosts = 64

// A name must not look like an option of ssh. An address of version 6 stands in brackets, or is given without a number of workers.
var named = regexp.MustCompile(`^(?:([A-Za-z0-9_][A-Za-z0-9_.-]*)@)?([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])(?::([0-9]+))?$`)

// Parse reads a list of hosts.
func Parse(list []string) (hosts []Host, err error) {
	for _, text := range list {
		h, err := parse(strings.TrimSpace(text))
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(hosts, func(other Host) bool { return other.Name == h.Name }) {
			return nil, fmt.Errorf("%s stands there twice: give %[1]s:N for more workers", h.Name)
		}
		hosts = append(hosts, h)
	}
	switch {
	case len(hosts) == 0:
		return nil, errors.New("no host is named: give HOST or HOST:N")
	case len(hosts) > MaxHosts:
		return nil, fmt.Errorf("%d hosts are named: give at most %d", len(hosts), MaxHosts)
	}
	return hosts, nil
}

func parse(text string) (h Host, err error) {
	if ip, err := netip.ParseAddr(text); err == nil && ip.Is6() {
		return Host{Name: text}, nil
	}
	m := named.FindStringSubmatch(text)
	if m == nil {
		return h, fmt.Errorf("%.80q is no host: give HOST or HOST:N, where HOST is a name for ssh", text)
	}
	h.Name = strings.Trim(m[2], "[]")
	if m[1] != "" {
		h.Name = m[1] + "@" + h.Name
	}
	if m[3] != "" {
		if h.Workers, err = strconv.Atoi(m[3]); err != nil || h.Workers == 0 {
			return h, fmt.Errorf("%s: the number after the colon is that of workers, at least 1; ports stand in the configuration of ssh", text)
		}
	}
	return h, nil
}

// maxFile bounds a file of hosts, in bytes.
const maxFile = 1 << 16

// ReadFile reads a file with one host a line. What follows a # is a comment.
func ReadFile(path string) ([]Host, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("%s has more than %d bytes: give a file with one host a line", path, maxFile)
	}
	var list []string
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line != "" {
			list = append(list, line)
		}
	}
	hosts, err := Parse(list)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return hosts, nil
}

// address returns the host without a user; "" if that is another user than the one of this process.
func (h Host) address() string {
	as, host, found := strings.Cut(h.Name, "@")
	if !found {
		return h.Name
	}
	if u, err := user.Current(); err != nil || u.Username != as {
		return ""
	}
	return host
}

// Split takes this machine out of a list: localhost, its host name, or a name with an address of this machine. It may be missing.
// A name that only the configuration of ssh knows is that of another machine.
func Split(ctx context.Context, hosts []Host) (own *Host, others []Host, err error) {
	local := make([]bool, len(hosts))
	hostname, _ := os.Hostname()
	short, _, _ := strings.Cut(hostname, ".")
	for i, h := range hosts {
		name := h.address()
		local[i] = name == "localhost" || name != "" && (name == hostname || name == short)
	}
	if !slices.Contains(local, true) {
		addrs, err := net.InterfaceAddrs()
		if err != nil {
			return nil, nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, timing.Lookup)
		defer cancel()
		var all sync.WaitGroup
		for i, h := range hosts {
			all.Go(func() {
				if name := h.address(); name != "" {
					local[i] = leadsTo(ctx, name, addrs)
				}
			})
		}
		all.Wait()
	}
	for i, h := range hosts {
		switch {
		case !local[i]:
			others = append(others, h)
		case own != nil:
			return nil, nil, fmt.Errorf("%s and %s are both this machine: leave one of them out", own.Name, h.Name)
		default:
			own = &h
		}
	}
	return own, others, nil
}

// leadsTo reports whether a name has an address of this machine.
func leadsTo(ctx context.Context, name string, own []net.Addr) bool {
	ips, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	return slices.ContainsFunc(ips, func(ip netip.Addr) bool {
		ip = ip.Unmap().WithZone("")
		return ip.IsLoopback() || slices.ContainsFunc(own, func(a net.Addr) bool {
			p, err := netip.ParsePrefix(a.String())
			return err == nil && p.Addr().Unmap() == ip
		})
	})
}

// Of reads the hosts of --hosts or --hosts-file; nil if neither is given. One that is given with nothing, as by a variable that is not
// set, is an error: without it, the command would take this machine alone.
func Of(given func(flag string) bool, list []string, file string) (hosts []Host, err error) {
	flag := "--hosts"
	switch {
	case given("hosts") && given("hosts-file"):
		return nil, errors.New("--hosts and --hosts-file: give one of them")
	case given("hosts"):
		hosts, err = Parse(list)
	case given("hosts-file"):
		flag = "--hosts-file"
		hosts, err = ReadFile(file)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	return hosts, nil
}

// WorkersOr returns the number of workers on the host, if all others have so many.
func (h Host) WorkersOr(others int) int { return cmp.Or(h.Workers, others) }
