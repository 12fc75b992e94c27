// Package admit lets another machine into a run by a ticket.
//
// A ticket holds addresses of a machine of the run, the fingerprint of the run's certificate and a token. [Dial] tries all addresses side by
// side, keeps the first that proves the fingerprint, and shows it the token; a [Server] that knows the token takes one request and gives one
// reply. What both contain is up to the callers.
//
// # Wire format, version 1
//
// TLS 1.3, in which the server proves the key of its certificate. Inside:
//
//	hello    24  "SLTNJOIN", 16 bytes token            joiner → server
//	verdict   5  admitted, or unknown, or expired      server → joiner, which ends the connection unless it is admitted
//	request      at most 64 KiB                        joiner → server
//	answer       reply of at most 16 MiB, or refused   server → joiner
//
// After the hello come frames: type (1 byte), length (uint32, little-endian), payload. The payload of refused is a line of text.
//
// # Bounds
//
// A server reads the 24 bytes of the hello, and nothing else, from a connection that has not shown a token. It holds a bounded number of such
// connections, each for [timing.Handshake]; a new one closes the oldest. Bytes recorded from another connection prove nothing, as TLS keys
// are drawn for each connection.
package admit

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Token shows that its holder may join. It has no textual form, so that no log or message shows it.
type Token [16]byte

// Format implements [fmt.Formatter].
func (Token) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, "(secret)") }

// Fingerprint is the SHA-256 of the public key of a certificate, as it stands there (SubjectPublicKeyInfo).
type Fingerprint [32]byte

// Ticket is what a machine needs to know to join a run.
type Ticket struct {
	Addrs       []string // HOST:PORT; the host is a name, or an IP address, in brackets if it is of version 6
	Fingerprint Fingerprint
	Token       Token
}

const (
	scheme  = "soliton-"
	version = "1"
	prefix  = scheme + version + "-"

	// MaxAddrs is how many addresses a ticket has at most.
	MaxAddrs = 32
	maxAddr  = 255
	maxText  = 4096
)

// Errors of [ParseTicket].
var (
	ErrNotTicket     = errors.New("not a ticket: it must begin with " + prefix)
	ErrTicketVersion = errors.New("the ticket is made by another version of the launcher")
	ErrDamagedTicket = errors.New("the ticket is damaged: copy all of it")
	ErrNoAddress     = errors.New("the ticket has no address")
)

// Text returns the ticket as one word of letters, digits, "-" and "_". It contains the token, so every reader of it can join.
func (t Ticket) Text() string {
	b := slices.Concat(t.Fingerprint[:], t.Token[:])
	for _, a := range t.Addrs {
		b = append(b, byte(len(a)))
		b = append(b, a...)
	}
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	return prefix + base64.RawURLEncoding.EncodeToString(b)
}

// ParseTicket reads what [Ticket.Text] returns, between white space. It accepts no other text for the same ticket.
func ParseTicket(text string) (Ticket, error) {
	text = strings.TrimSpace(text)
	rest, ok := strings.CutPrefix(text, scheme)
	made, body, dash := strings.Cut(rest, "-")
	number, err := strconv.ParseUint(made, 10, 16)
	if !ok || !dash || err != nil {
		return Ticket{}, ErrNotTicket
	}
	if made != version {
		return Ticket{}, fmt.Errorf("%w: its format is version %d, this launcher reads version %s", ErrTicketVersion, number, version)
	}
	if len(text) > maxText {
		return Ticket{}, ErrDamagedTicket
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(body)
	var t Ticket
	least := len(t.Fingerprint) + len(t.Token)
	if err != nil || len(b) < least+crc32.Size {
		return Ticket{}, ErrDamagedTicket
	}
	b, sum := b[:len(b)-crc32.Size], binary.BigEndian.Uint32(b[len(b)-crc32.Size:])
	if crc32.ChecksumIEEE(b) != sum {
		return Ticket{}, ErrDamagedTicket
	}
	copy(t.Fingerprint[:], b)
	copy(t.Token[:], b[len(t.Fingerprint):])
	for b = b[least:]; len(b) > 0; {
		n := int(b[0])
		if len(b) <= n {
			return Ticket{}, ErrDamagedTicket
		}
		t.Addrs = append(t.Addrs, string(b[1:1+n]))
		b = b[1+n:]
	}
	if err := checkAddrs(t.Addrs); err != nil {
		return Ticket{}, err
	}
	if t.Text() != text { // base64 skips ends of lines
		return Ticket{}, ErrDamagedTicket
	}
	return t, nil
}

// checkAddrs reports what is wrong with the addresses of a ticket.
func checkAddrs(addrs []string) error {
	if len(addrs) == 0 {
		return ErrNoAddress
	}
	if len(addrs) > MaxAddrs {
		return fmt.Errorf("a ticket of %d addresses; it may have %d", len(addrs), MaxAddrs)
	}
	for _, a := range addrs {
		host, port, err := net.SplitHostPort(a)
		number, bad := strconv.ParseUint(port, 10, 16)
		printable := !strings.ContainsFunc(host, func(r rune) bool { return r <= ' ' || r > '~' })
		if err != nil || bad != nil || number == 0 || host == "" || len(a) > maxAddr || !printable {
			return fmt.Errorf("a ticket with the address %.64q; it must be HOST:PORT", a)
		}
	}
	return nil
}
