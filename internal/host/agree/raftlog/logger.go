package raftlog

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/hashicorp/go-hclog"
)

// sink hands raft's log on. An election or a lost peer is raft's business and
// our agents' detail, so all levels go down by one.
type sink struct{ to *slog.Logger }

func newLogger(to *slog.Logger) hclog.Logger {
	if to == nil {
		return hclog.NewNullLogger()
	}
	l := hclog.NewInterceptLogger(&hclog.LoggerOptions{Name: "raft", Level: hclog.Off, Output: io.Discard})
	l.RegisterSink(sink{to})
	return l
}

func (s sink) Accept(name string, level hclog.Level, msg string, args ...any) {
	to := slog.LevelDebug
	switch level {
	case hclog.Error:
		to = slog.LevelWarn
	case hclog.Warn:
		to = slog.LevelInfo
	}
	if !s.to.Enabled(context.Background(), to) {
		return
	}
	attrs := make([]any, 0, len(args)+2)
	attrs = append(attrs, "part", name)
	for i := 0; i+1 < len(args); i += 2 {
		v := args[i+1]
		if f, ok := v.(hclog.Format); ok && len(f) > 0 {
			v = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
		attrs = append(attrs, fmt.Sprint(args[i]), v)
	}
	s.to.Log(context.Background(), to, msg, attrs...)
}
