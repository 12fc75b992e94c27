package auth

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/soliton-train/soliton/internal/timing"
)

// Accept returns the next connection of a listener. After an error it tries again in a while, since file descriptors that are short may
// be there then, until the listener is closed or ctx has ended.
func Accept(ctx context.Context, l interface{ Accept() (net.Conn, error) }) (net.Conn, error) {
	for {
		c, err := l.Accept()
		if err == nil || errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
			return c, err
		}
		select {
		case <-time.After(timing.Retry):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
