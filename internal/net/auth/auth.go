// Package auth proves that both ends of a connection hold the key of a run, before either end parses anything else that the
// other sends.
//
// # Wire format, version 1
//
// The answerer challenges, the caller proves, the answerer confirms:
//
//	challenge 40  "SLTNKEY1", 32 bytes nonce                        answerer → caller
//	proof     80  32 bytes nonce, from and to, 32 bytes MAC          caller → answerer
//	confirm   32  32 bytes MAC                                       answerer → caller
//
// From and to are the sessions of the caller and of the answerer (each uint32 worker, uint32 incarnation, little-endian). A MAC
// is HMAC-SHA256, under the key, of the role of its sender (16 bytes of text), the nonces of the answerer and of the caller, from
// and to. Every message follows a header like that of the frames of package comm: type, 3 zero, uint32 length, 8 zero.
//
// Both nonces are random, so recorded bytes prove nothing on another connection, and the roles differ, so no end accepts its own
// MAC. Whoever holds the key is trusted to be the session that it says: a process that may read the memory of a worker can take
// its place. Bytes after the handshake are not protected: on one machine only root can write to a connection of others, and TLS
// protects links between machines.
//
// # Bounds
//
// Messages have a fixed size, and a message that is wrong ends the handshake. The caller of [Call] and [Answer] bounds their time
// with the connection's deadline. A [Lobby] bounds the connections that have not proved anything yet.
package auth

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/soliton-train/soliton/internal/id"
)

// KeySize is the size of a key in bytes.
const KeySize = 32

// Key is a secret. It has no textual form, so that no log or message shows it.
type Key []byte

// NewKey draws a key.
func NewKey() Key {
	k := make(Key, KeySize)
	_, _ = rand.Read(k) // it never fails
	return k
}

// DeriveKey returns the key for a purpose that follows from a secret.
func DeriveKey(secret []byte, purpose string) (Key, error) {
	k, err := hkdf.Key(sha256.New, secret, nil, "soliton "+purpose+", version 1", KeySize)
	if err != nil {
		return nil, fmt.Errorf("auth: key from the secret: %w", err)
	}
	return k, nil
}

// Format implements [fmt.Formatter].
func (Key) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, "(secret)") }

// ErrKey means that the other end does not hold the key.
var ErrKey = errors.New("the other end does not hold the key of the run")

// Ends are the sessions at the ends of a connection.
type Ends struct {
	From id.Session // which called
	To   id.Session // which answered
}

const (
	headerSize = 16
	nonceSize  = 32
	endsSize   = 16

	challenge, challengeSize = 0xc1, len(magic) + nonceSize
	proof, proofSize         = 0xc2, nonceSize + endsSize + sha256.Size
	confirm, confirmSize     = 0xc3, sha256.Size

	magic    = "SLTNKEY1"
	caller   = "soliton caller 1"
	answerer = "soliton answer 1"
)

// Call proves to the answerer of a connection that the caller holds the key, and has the answerer prove the same. first are bytes
// that follow the proof at once, to save a round trip; they are sent to an answerer that has proved nothing.
func Call(c io.ReadWriter, key Key, ends Ends, first []byte) error {
	m, err := receive(c, challenge, challengeSize)
	if err != nil {
		return err
	}
	if string(m[:len(magic)]) != magic {
		return fmt.Errorf("auth: the other end speaks another protocol than %s", magic)
	}
	var nonce [nonceSize]byte
	_, _ = rand.Read(nonce[:]) // it never fails
	said := said{answerer: [nonceSize]byte(m[len(magic):]), caller: nonce, ends: ends}
	b := append(header(proof, proofSize), nonce[:]...)
	b = ends.Append(b)
	b = append(b, said.mac(key, caller)...)
	if _, err := c.Write(append(b, first...)); err != nil {
		return fmt.Errorf("auth: send the proof: %w", err)
	}
	if m, err = receive(c, confirm, confirmSize); err != nil {
		return err
	}
	if !hmac.Equal(m, said.mac(key, answerer)) {
		return fmt.Errorf("auth: %w", ErrKey)
	}
	return nil
}

// Answer has the caller of a connection prove that it holds the key, and then proves the same. It returns the ends that the caller
// names. It reads no byte that follows the proof.
func Answer(c io.ReadWriter, key Key) (Ends, error) {
	var nonce [nonceSize]byte
	_, _ = rand.Read(nonce[:])
	if _, err := c.Write(append(append(header(challenge, challengeSize), magic...), nonce[:]...)); err != nil {
		return Ends{}, fmt.Errorf("auth: send the challenge: %w", err)
	}
	m, err := receive(c, proof, proofSize)
	if err != nil {
		return Ends{}, err
	}
	ends := DecodeEnds(m[nonceSize:])
	said := said{answerer: nonce, caller: [nonceSize]byte(m), ends: ends}
	if !hmac.Equal(m[nonceSize+endsSize:], said.mac(key, caller)) {
		return Ends{}, fmt.Errorf("auth: %w", ErrKey)
	}
	if _, err := c.Write(append(header(confirm, confirmSize), said.mac(key, answerer)...)); err != nil {
		return Ends{}, fmt.Errorf("auth: send the confirmation: %w", err)
	}
	return ends, nil
}

// said is what both ends know after the proof.
type said struct {
	answerer, caller [nonceSize]byte
	ends             Ends
}

func (s said) mac(key Key, role string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(role))
	h.Write(s.answerer[:])
	h.Write(s.caller[:])
	h.Write(s.ends.Append(nil))
	return h.Sum(nil)
}

func header(kind byte, size int) []byte {
	h := make([]byte, headerSize, headerSize+size)
	h[0] = kind
	binary.LittleEndian.PutUint32(h[4:], uint32(size))
	return h
}

// receive reads a message and returns its payload.
func receive(c io.Reader, kind byte, size int) ([]byte, error) {
	m := make([]byte, headerSize+size)
	if _, err := io.ReadFull(c, m); err != nil {
		return nil, fmt.Errorf("auth: receive message %#x: %w", kind, err)
	}
	if string(m[:headerSize]) != string(header(kind, size)) {
		return nil, fmt.Errorf("auth: message %#x begins with % x", kind, m[:headerSize])
	}
	return m[headerSize:], nil
}

// Append appends the encoding of the ends.
func (e Ends) Append(b []byte) []byte {
	for _, s := range []id.Session{e.From, e.To} {
		b = binary.LittleEndian.AppendUint32(b, uint32(s.Worker))
		b = binary.LittleEndian.AppendUint32(b, uint32(s.Incarnation))
	}
	return b
}

// DecodeEnds reads what [Ends.Append] appends.
func DecodeEnds(b []byte) Ends {
	at := func(i int) int { return int(binary.LittleEndian.Uint32(b[4*i:])) }
	return Ends{
		From: id.Session{Worker: id.WorkerID(at(0)), Incarnation: at(1)},
		To:   id.Session{Worker: id.WorkerID(at(2)), Incarnation: at(3)},
	}
}
