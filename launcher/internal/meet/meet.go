// Package meet brings the machines together that a scheduler has started: one of them has the ticket of a run, and gives it to those
// that prove by what the scheduler gave them that they are of the same job.
//
// The connection is TLS 1.3, with a key that the first machine draws. Both sides then prove themselves over a value that only the two
// ends of this very connection have (RFC 9266), so neither a recorded proof nor one that is passed on proves anything elsewhere:
//
//	proof    at most 4 KiB   of a machine that asks
//	proof    at most 4 KiB   of the first machine
//	ticket   at most 4 KiB   from the first machine
//
// Each comes after its length (uint16, big-endian).
package meet

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/timing"
)

// Prover proves to another machine that this one is of the same job, and checks the proofs of others.
type Prover interface {
	// Prove returns a proof of a statement, and Check returns what is wrong with a proof of one.
	Prove(ctx context.Context, statement string) ([]byte, error)
	Check(ctx context.Context, statement string, proof []byte) error
}

// maxFrame bounds a proof and a ticket, in bytes.
const maxFrame = 4 << 10

// maxAsking bounds the connections that have proved nothing yet.
const maxAsking = 64

// Server gives the ticket to the machines of its job.
type Server struct {
	listener net.Listener
	prover   Prover
	ticket   func() (string, error) // of the moment
	refused  func(from net.Addr, err error)
	tls      *tls.Config

	lobby *auth.Lobby
	ctx   context.Context
	stop  context.CancelFunc
	tasks sync.WaitGroup
}

// Serve starts a server, which closes the listener in the end. refused is told of each caller that proves nothing.
func Serve(l net.Listener, p Prover, ticket func() (string, error), refused func(from net.Addr, err error)) (*Server, error) {
	cert, err := certificate()
	if err != nil {
		return nil, err
	}
	s := &Server{
		listener: l, prover: p, ticket: ticket, refused: refused, lobby: auth.NewLobby(maxAsking),
		tls: &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, SessionTicketsDisabled: true},
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.tasks.Go(s.serve)
	return s, nil
}

// certificate makes one with a new key. Its names mean nothing.
func certificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	plain := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().AddDate(1, 0, 0)}
	der, err := x509.CreateCertificate(rand.Reader, plain, plain, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// Close closes the listener and all connections.
func (s *Server) Close() {
	s.stop()
	_ = s.listener.Close()
	s.lobby.Close()
	s.tasks.Wait()
}

func (s *Server) serve() {
	for {
		c, err := auth.Accept(s.ctx, s.listener)
		if err != nil {
			return
		}
		if s.lobby.Enter(c) {
			s.tasks.Go(func() {
				defer c.Close()
				err := s.answer(c)
				if s.lobby.Leave(c) && err != nil && s.ctx.Err() == nil && !errors.Is(err, io.EOF) {
					s.refused(c.RemoteAddr(), err)
				}
			})
		}
	}
}

// answer gives the ticket to a caller that proves itself.
func (s *Server) answer(raw net.Conn) error {
	ctx, cancel := context.WithTimeout(s.ctx, timing.Handshake)
	defer cancel()
	raw.SetDeadline(time.Now().Add(timing.Handshake))
	c := tls.Server(raw, s.tls)
	if err := c.HandshakeContext(ctx); err != nil {
		return err
	}
	asks, gives, err := statements(c)
	if err != nil {
		return err
	}
	proof, err := readFrame(c)
	if err == nil {
		err = s.prover.Check(ctx, asks, proof)
	}
	if err == nil {
		proof, err = s.prover.Prove(ctx, gives)
	}
	var ticket string
	if err == nil {
		ticket, err = s.ticket()
	}
	if err != nil {
		return err
	}
	return errors.Join(writeFrame(c, proof), writeFrame(c, []byte(ticket)))
}

// Ask returns the ticket of the run of this job. It tries the addresses in turn until one gives it, or ctx ends.
func Ask(ctx context.Context, addrs []string, p Prover) (string, error) {
	for {
		ticket, err := AskOnce(ctx, addrs, p)
		if err == nil {
			return ticket, nil
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		select {
		case <-time.After(timing.Probe):
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

// AskOnce tries each address once.
func AskOnce(ctx context.Context, addrs []string, p Prover) (string, error) {
	var causes []error
	for _, addr := range addrs {
		ticket, err := ask(ctx, addr, p)
		if err == nil {
			return ticket, nil
		}
		causes = append(causes, fmt.Errorf("%s: %w", addr, err))
	}
	return "", errors.Join(causes...)
}

func ask(ctx context.Context, addr string, p Prover) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timing.Handshake)
	defer cancel()
	raw, err := (&net.Dialer{Timeout: timing.Default}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer raw.Close()
	stop := context.AfterFunc(ctx, func() { raw.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	c := tls.Client(raw, &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}) // the proof counts, not the certificate
	if err := c.HandshakeContext(ctx); err != nil {
		return "", err
	}
	asks, gives, err := statements(c)
	if err != nil {
		return "", err
	}
	proof, err := p.Prove(ctx, asks)
	if err == nil {
		err = writeFrame(c, proof)
	}
	if err == nil {
		proof, err = readFrame(c)
	}
	if err == nil {
		err = p.Check(ctx, gives, proof)
	}
	if err != nil {
		return "", err
	}
	ticket, err := readFrame(c)
	return string(ticket), err
}

// statements are what the two ends of a connection prove.
func statements(c *tls.Conn) (asks, gives string, err error) {
	state := c.ConnectionState()
	binding, err := state.ExportKeyingMaterial("EXPORTER-Soliton-Meet", nil, 32)
	return fmt.Sprintf("soliton 1 asks %x", binding), fmt.Sprintf("soliton 1 gives %x", binding), err
}

func writeFrame(w io.Writer, b []byte) error {
	if len(b) > maxFrame {
		return fmt.Errorf("meet: %d bytes, more than %d", len(b), maxFrame)
	}
	_, err := w.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
	return err
}

func readFrame(r io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(size[:]))
	if n > maxFrame {
		return nil, fmt.Errorf("meet: %d bytes, more than %d", n, maxFrame)
	}
	b := make([]byte, n)
	_, err := io.ReadFull(r, b)
	return b, err
}
