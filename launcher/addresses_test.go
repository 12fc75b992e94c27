package main

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/net/admit"
)

// Machines meet at addresses of both versions, at a pinned port, and at those that their users choose.
func TestAddresses(t *testing.T) {
	built(t)
	t.Parallel()
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("the loopback interface has no IPv6: %v", err)
	}
	l.Close()
	port := freePort(t)
	for _, c := range []struct {
		run, join []string
		tickets   string // addresses in it; "" does not matter
	}{
		{[]string{"--listen=[::1]:" + port}, nil, "[::1]:" + port},
		{[]string{"--listen=:" + port, "--advertise", "::1"}, []string{"--advertise", "::1"}, "[::1]:" + port},
		{[]string{"--listen", "--advertise", "127.0.0.1:" + port + ",127.0.0.1"}, []string{"--advertise", "127.0.0.1"}, ""},
	} {
		t.Run(strings.Join(c.run, " "), func(t *testing.T) {
			args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "1", "--wait-hosts", "2"}, c.run...)
			first := startMachine(t, "", append(args, mlp, "--steps", "10", "--eval-every", "0")...)
			all := joined(t, 2, first, append(append([]string{"join", "--plain", "--run-dir", "run"}, c.join...), "-")...)
			ticket, err := admit.ParseTicket(strings.TrimSpace(first.ticket))
			if err != nil {
				t.Fatal(err)
			}
			if addrs := strings.Join(ticket.Addrs, ","); c.tickets != "" && addrs != c.tickets {
				t.Errorf("the ticket leads to %s, not %s", addrs, c.tickets)
			}
			for i, m := range all {
				if status := m.end(t); status != 0 {
					t.Fatalf("machine %d: status %d\n%s", i, status, &m.errs)
				}
			}
		})
	}
}

// A machine with a flag that cannot be right does not join, and the run waits for another one.
func TestWrongMachine(t *testing.T) {
	built(t)
	t.Parallel()
	first := startMachine(t, "", "run", "--plain", "--threads", "1", "--run-dir", "run", "--workers", "1", "--listen=127.0.0.1:0", "--wait-hosts", "2", mlp, "--steps", "10", "--eval-every", "0")
	wrong := map[string][]string{
		"--ports 21000-21002: 3 ports; a machine with 1 worker takes 6\n":                                                               {"--ports", "21000-21002"},
		"--ports 21000-21006: 7 ports; a machine with 2 workers takes 8\n":                                                              {"--ports", "21000-21006", "--workers", "2"},
		"--advertise 192.0.2.1: this machine cannot listen there (bind: cannot assign requested address): give an address of its own\n": {"--advertise", "192.0.2.1"},
	}
	for want, flags := range wrong {
		m := joined(t, 2, first, append(append([]string{"join", "--plain", "--run-dir", "run"}, flags...), "-")...)[1]
		if status := m.end(t); status != 1 || !strings.HasSuffix(m.errs.String(), want) {
			t.Errorf("%q: status %d and %q, want %q", flags, status, &m.errs, want)
		}
	}
	for i, m := range joined(t, 2, first, "join", "--plain", "--run-dir", "run", "-") {
		if status := m.end(t); status != 0 {
			t.Errorf("machine %d: status %d\n%s", i, status, &m.errs)
		}
	}
	for want, flags := range wrong {
		m := startMachine(t, "", append(append([]string{"run", "--plain", "--run-dir", "run", "--workers", "1", "--listen"}, flags...), mlp)...)
		if status := m.end(t); status != 1 || !strings.HasSuffix(m.errs.String(), want) {
			t.Errorf("run %q: status %d and %q, want %q", flags, status, &m.errs, want)
		}
	}
}

// freePort returns a port that nothing listens at, and that the kernel gives to no connection by itself.
func freePort(t *testing.T) string {
	t.Helper()
	for n := range 1000 {
		port := strconv.Itoa(20000 + (os.Getpid()+n)%10000)
		if l, err := net.Listen("tcp", ":"+port); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no free port")
	return ""
}
