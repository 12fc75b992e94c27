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
