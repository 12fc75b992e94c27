package gossip

import (
	"context"
	"log"
	"log/slog"
	"strings"
)

// A logWriter passes the library's lines on, each with its level.
type logWriter struct{ to *slog.Logger }

// libraryLogger returns what the library writes its lines to.
func libraryLogger(to *slog.Logger) *log.Logger { return log.New(logWriter{to}, "", 0) }

// Write implements [io.Writer]: a line such as "[WARN] memberlist: ...".
func (w logWriter) Write(line []byte) (int, error) {
	text := strings.TrimSpace(string(line))
	level := slog.LevelInfo
	if tag, rest, ok := strings.Cut(text, "] "); ok && tag[0] == '[' {
		text = rest
		switch tag[1:] {
		case "DEBUG":
			level = slog.LevelDebug
		case "WARN", "ERR", "ERROR": // an error there is a lost packet here: nothing ends by it
			level = slog.LevelWarn
		}
	}
	w.to.Log(context.Background(), level, strings.TrimPrefix(text, "memberlist: "))
	return len(line), nil
}
