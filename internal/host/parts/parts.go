// Package parts moves files between hosts: one asks for a part after the other, over a connection for that alone, and checks what has
// come once it has all.
package parts

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/timing"
)

const maxPart = 1 << 20 // bytes of a Part

// Reader reads a file of another host.
type Reader struct {
	ctx  context.Context
	conn *control.Conn
	next control.Fetch
	rest []byte
}

// NewReader returns a reader of the file that first names, from there on. What waits ends with ctx, or when the host does not answer.
func NewReader(ctx context.Context, conn *control.Conn, first control.Fetch) *Reader {
	first.Protocol = control.Protocol
	return &Reader{ctx: ctx, conn: conn, next: first}
}

// Read implements [io.Reader].
func (r *Reader) Read(b []byte) (int, error) {
	if len(r.rest) == 0 {
		m, err := Ask(r.ctx, r.conn, r.next)
		if err != nil {
			return 0, err
		}
		switch p, ok := m.(control.Part); {
		case !ok || len(p.Data) > maxPart:
			return 0, fmt.Errorf("it answers with %T", m)
		case p.Err != "":
			return 0, errors.New(strings.Join(strings.Fields(p.Err), " "))
		case len(p.Data) == 0:
			return 0, io.EOF
		default:
			r.rest = p.Data
			r.next.At += int64(len(p.Data))
		}
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Ask sends a message and returns the answer, for which the other side has some time.
func Ask(ctx context.Context, conn *control.Conn, m control.Message) (control.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, timing.Handshake)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err := conn.Send(m); err != nil {
		return nil, err
	}
	return conn.Receive(ctx)
}

// Serve answers a host that asks for files, until it asks for no more. open opens the file that a Fetch names.
func Serve(ctx context.Context, conn *control.Conn, m control.Fetch, open func(control.Fetch) (*os.File, error)) {
	var f *os.File
	var of control.Fetch
	defer func() {
		if f != nil {
			_ = f.Close()
		}
	}()
	for {
		var p control.Part
		var err error
		if f == nil || m.Step != of.Step || m.File != of.File || m.SHA256 != of.SHA256 {
			if f != nil {
				_ = f.Close()
			}
			f, err = open(m)
			of = m
		}
		if err == nil && m.At < 0 {
			err = errors.New("a file begins at 0")
		}
		if err == nil {
			p.Data = make([]byte, maxPart)
			var n int
			if n, err = f.ReadAt(p.Data, m.At); errors.Is(err, io.EOF) {
				err = nil
			}
			p.Data = p.Data[:n]
		}
		if err != nil {
			p = control.Part{Err: err.Error()}
		}
		if !Answer(conn, p) || err != nil {
			return
		}
		again, heard := Next(ctx, conn)
		var ok bool
		if m, ok = again.(control.Fetch); heard != nil || !ok {
			return
		}
	}
}

// Answer sends an answer, and reports whether it was taken in time.
func Answer(conn *control.Conn, m control.Message) bool {
	late := time.AfterFunc(timing.Handshake, func() { _ = conn.Close() })
	defer late.Stop()
	return conn.Send(m) == nil
}

// Next returns the next message, for which the other side has some time.
func Next(ctx context.Context, conn *control.Conn) (control.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, timing.Handshake)
	defer cancel()
	return conn.Receive(ctx)
}
