//go:build !linux || portable

package line

import (
	"errors"
	"net"
)

const supported = false

// socket does nothing.
type socket struct{}

func newSocket(net.Conn) (socket, error) { return socket{}, errors.ErrUnsupported }

func (socket) shutdown()                        {}
func (socket) close()                           {}
func (socket) send(a, b []byte) (int, error)    { return 0, errors.ErrUnsupported }
func (socket) receive(a, b []byte) (int, error) { return 0, errors.ErrUnsupported }

// poller does nothing.
type poller struct{}

func newPoller() (*poller, error) { return nil, errors.ErrUnsupported }

func (*poller) close()                   {}
func (*poller) ring()                    {}
func (*poller) reset()                   {}
func (*poller) add(s socket, write bool) {}
func (*poller) sleep()                   {}
