package admit

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var sample = Ticket{Addrs: []string{"10.77.0.1:41234", "[fd00::1]:41234", "node-1.example:80"}, Fingerprint: Fingerprint{1, 2, 3}, Token: Token{4, 5, 6}}

// sealed returns a ticket's text with any bytes where the addresses stand.
func sealed(addrs []byte) string {
	b := append(make([]byte, 48), addrs...)
	return prefix + base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b)))
}

func TestTicket(t *testing.T) {
	text := sample.Text()
	for _, s := range []string{text, " \t" + text + "\r\n"} {
		if got, err := ParseTicket(s); err != nil || !reflect.DeepEqual(got, sample) {
			t.Errorf("%v, %v", got, err)
		}
	}
	if s := fmt.Sprintf("%v %+v %s %x", sample, sample, sample.Token, sample.Token); strings.Contains(s, "4 5 6") || strings.Contains(s, "040506") || strings.Count(s, "(secret)") != 4 {
		t.Errorf("a token is printed as %s", s)
	}
	for i := len(prefix); i < len(text); i++ {
		b := []byte(text)
		b[i] ^= 1
		if _, err := ParseTicket(string(b)); !errors.Is(err, ErrDamagedTicket) {
			t.Errorf("another byte %d: %v", i, err)
		}
		if _, err := ParseTicket(text[:i]); !errors.Is(err, ErrDamagedTicket) {
			t.Errorf("cut off at %d: %v", i, err)
		}
	}
	address := func(a string) string { return sealed(append([]byte{byte(len(a))}, a...)) }
	for _, c := range []struct {
		text string
		want string
	}{
		{"", "not a ticket: it must begin with soliton-1-"},
		{"soliton", "not a ticket: it must begin with soliton-1-"},
		{"soliton-one-two", "not a ticket: it must begin with soliton-1-"},
		{"soliton-99999-", "not a ticket: it must begin with soliton-1-"},
		{"soliton-2-abc", "the ticket is made by another version of the launcher: its format is version 2, this launcher reads version 1"},
		{prefix + strings.Repeat("A", 1<<20), "the ticket is damaged: copy all of it"},
		{text + "=", "the ticket is damaged: copy all of it"},
		{text[:40] + "\n" + text[40:], "the ticket is damaged: copy all of it"},
		{sealed([]byte{9, 1}), "the ticket is damaged: copy all of it"},
		{sealed(nil), "the ticket has no address"},
		{sealed(make([]byte, 33)), "a ticket of 33 addresses; it may have 32"},
		{address("host"), `a ticket with the address "host"; it must be HOST:PORT`},
		{address(":80"), `a ticket with the address ":80"; it must be HOST:PORT`},
		{address("host:0"), `a ticket with the address "host:0"; it must be HOST:PORT`},
		{address("host:65536"), `a ticket with the address "host:65536"; it must be HOST:PORT`},
		{address("a\x1b[2J:80"), `a ticket with the address "a\x1b[2J:80"; it must be HOST:PORT`},
	} {
		if _, err := ParseTicket(c.text); err == nil || err.Error() != c.want {
			t.Errorf("%.40q: %v, want %s", c.text, err, c.want)
		}
	}
}

func FuzzTicket(f *testing.F) {
	f.Add(sample.Text())
	f.Add(sealed([]byte("\x04a:80")))
	f.Add("soliton-2-x")
	f.Fuzz(func(t *testing.T, text string) {
		if ticket, err := ParseTicket(text); err == nil && (ticket.Text() != strings.TrimSpace(text) || checkAddrs(ticket.Addrs) != nil) {
			t.Errorf("%q is read as %+v", text, ticket)
		}
	})
}

// The checksum keeps a fuzzer out of the addresses, so it gets a target of its own behind it.
func FuzzTicketAddrs(f *testing.F) {
	f.Add([]byte("\x04a:80\x08[::1]:80"))
	f.Fuzz(func(t *testing.T, addrs []byte) {
		text := sealed(addrs)
		if ticket, err := ParseTicket(text); err == nil && ticket.Text() != text {
			t.Errorf("%q is read as %+v", addrs, ticket)
		}
	})
}

func TestTokens(t *testing.T) {
	own, other := issuer{[]byte("key")}, issuer{[]byte("another key")}
	now := time.Unix(1000, 0)
	a, b := own.issue(now.Add(time.Minute)), own.issue(now.Add(time.Hour))
	check := func(token Token, at time.Time, want error) {
		t.Helper()
		if got := own.judge(token, at); !errors.Is(got, want) || (want == nil) != (got == nil) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	check(a, now, nil)
	check(a, now.Add(time.Minute-1), nil)
	check(a, now.Add(time.Minute), ErrExpired)
	check(b, now.Add(time.Minute), nil)
	check(other.issue(now.Add(time.Hour)), now, ErrToken)
	check(Token{}, now, ErrToken)
	longer := a
	copy(longer[:4], b[:4])
	check(longer, now, ErrToken)
	check(own.issue(time.Unix(1<<40, 0)), now, nil)
	check(own.issue(time.Unix(-5, 0)), now, ErrExpired)
}

func TestOffer(t *testing.T) {
	machine := []netip.Addr{}
	for _, a := range []string{"127.0.0.1", "::1", "10.0.0.5", "fe80::1", "169.254.3.3", "fd00::5", "172.17.0.1", "10.0.0.5"} {
		machine = append(machine, netip.MustParseAddr(a))
	}
	for _, c := range []struct {
		at        string
		machine   []netip.Addr
		advertise []string
		want      []string
	}{
		{"[::]:7", machine, nil, []string{"10.0.0.5:7", "[fd00::5]:7", "172.17.0.1:7"}},
		{"0.0.0.0:7", machine, nil, []string{"10.0.0.5:7", "172.17.0.1:7"}},
		{"[::]:7", machine[:2], nil, []string{"127.0.0.1:7", "[::1]:7"}},
		{"[::]:7", machine[:4], nil, []string{"10.0.0.5:7"}},
		{"10.0.0.5:7", machine, nil, []string{"10.0.0.5:7"}},
		{"[::ffff:10.0.0.5]:7", machine, nil, []string{"10.0.0.5:7"}},
		{"127.0.0.1:7", machine, nil, []string{"127.0.0.1:7"}},
		{"[::]:7", machine, []string{"gate.example", "gate.example:90", "fd00::9", "[fd00::9]:90", "192.0.2.1"},
			[]string{"gate.example:7", "gate.example:90", "[fd00::9]:7", "[fd00::9]:90", "192.0.2.1:7"}},
	} {
		if got := offer(netip.MustParseAddrPort(c.at), c.machine, c.advertise); !slices.Equal(got, c.want) {
			t.Errorf("%s, advertising %v: %v, want %v", c.at, c.advertise, got, c.want)
		}
	}
	at := &net.TCPAddr{IP: net.IPv6zero, Port: 7}
	if got, err := Addrs(at, nil); err != nil || len(got) == 0 {
		t.Errorf("this machine: %v, %v", got, err)
	}
	if got, err := Addrs(at, []string{"a b"}); err == nil || !strings.Contains(err.Error(), "a b") {
		t.Errorf("advertising nonsense: %v, %v", got, err)
	}
}
