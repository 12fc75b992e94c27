package comm

import (
	"bytes"
	"context"
	"errors"
	"net"
	"testing"
	"testing/synctest"

	"github.com/soliton-train/soliton/internal/net/transport"
)

var errNoMemory = errors.New("no memory to share")

// unable is a network whose connections are to share memory, and cannot.
type unable struct{ transport.Transport }

func (u unable) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := u.Transport.Dial(ctx, addr)
	return unableConn{c}, err
}

func (u unable) Listen(addr string) (transport.Listener, error) {
	l, err := u.Transport.Listen(addr)
	return unableListener{l}, err
}

type unableListener struct{ transport.Listener }

func (l unableListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return unableConn{c}, nil
}

type unableConn struct{ net.Conn }

func (unableConn) Share(bool) (reason, err error) { return errNoMemory, nil }

// A link that cannot share memory works, and both ends say why.
func TestLinkWithoutMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := transport.NewMem()
		events := make(chan LinkEvent, 10)
		es := cluster(t, 2, Config{OnLink: func(ev LinkEvent) { events <- ev }}, func(int) transport.Transport { return unable{m} })
		want, got := pattern(100<<10, 1), make([]byte, 100<<10)
		r := es[1].Expect(user(1, 1), got)
		if err := es[0].Send(t.Context(), es[1].Self(), user(1, 1), want, Bulk); err != nil {
			t.Fatal(err)
		}
		if _, _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("other bytes arrived (%v)", err)
		}
		for range 2 {
			if ev := <-events; !ev.Up || !errors.Is(ev.Socket, errNoMemory) {
				t.Errorf("the event of the link is %+v", ev)
			}
		}
	})
}
