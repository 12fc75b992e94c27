package inspect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/act"
)

// farLogs are the logs on the other machines of a run, which the agent of this one brings while the run goes on.
type farLogs struct {
	dir    string
	worker int // -1 for all
	tails  map[control.LogFile]*farTail
	looked time.Time
	faults map[string]bool // that were told
}

// farTail is what was read of one.
type farTail struct {
	at   int64
	rest []byte // of a line whose end is still to come
}

const (
	// lookFar is the time between two looks at logs of other machines.
	lookFar = time.Second
	// maxFarLine bounds what is kept of a line; a longer one comes in parts.
	maxFarLine = 1 << 20
)

// there reports whether a run has other machines, each with logs of its own.
func (f *farLogs) there() bool {
	now, err := rundir.ReadWorkers(f.dir)
	return err == nil && now.Host != ""
}

// read calls each with every line since the last call, of which worker it is, and what is wrong. With last, also with lines without an end.
func (f *farLogs) read(ctx context.Context, last bool, each func(worker int, line []byte) error) (faults []string, err error) {
	if !last && time.Since(f.looked) < lookFar {
		return nil, nil
	}
	f.looked = time.Now()
	found, err := f.ask(ctx, control.ReadLog{Worker: -1})
	if err != nil {
		return f.news(err.Error()), nil //nolint:nilerr // what is here is shown all the same
	}
	faults = f.news(found.Err)
	for _, l := range found.Logs {
		if f.worker >= 0 && l.Worker != f.worker {
			continue
		}
		size := l.Size
		l.Size = 0
		t := f.tails[l]
		if t == nil {
			t = new(farTail)
			f.tails[l] = t
		}
		for t.at < size {
			part, err := f.ask(ctx, control.ReadLog{Host: l.Host, Worker: l.Worker, Incarnation: l.Incarnation, At: t.at})
			if err == nil && part.Err != "" {
				err = errors.New(part.Err)
			}
			if err != nil {
				faults = append(faults, f.news(err.Error())...)
				break
			}
			if len(part.Data) == 0 {
				break
			}
			t.at += int64(len(part.Data))
			if err := t.lines(part.Data, func(line []byte) error { return each(l.Worker, line) }); err != nil {
				return faults, err
			}
		}
		if last && len(t.rest) > 0 {
			if err := each(l.Worker, append(t.rest, '\n')); err != nil {
				return faults, err
			}
			t.rest = nil
		}
	}
	return faults, nil
}

// lines takes more bytes.
func (t *farTail) lines(data []byte, each func([]byte) error) error {
	t.rest = append(t.rest, data...)
	for {
		end := bytes.IndexByte(t.rest, '\n') + 1
		if end == 0 && len(t.rest) < maxFarLine {
			return nil
		}
		if end == 0 {
			end = len(t.rest)
		}
		if err := each(t.rest[:end]); err != nil {
			return err
		}
		t.rest = t.rest[end:]
	}
}

// news returns a text that was not told yet.
func (f *farLogs) news(text string) []string {
	if text == "" || f.faults[text] {
		return nil
	}
	f.faults[text] = true
	return []string{text}
}

func (f *farLogs) ask(ctx context.Context, m control.ReadLog) (l control.Logged, err error) {
	said, err := act.Ask(ctx, f.dir, m)
	if err != nil {
		return l, fmt.Errorf("the logs of other machines cannot be read: %w", err)
	}
	l, ok := said.(control.Logged)
	if !ok {
		return l, fmt.Errorf("the agent answers with %T", said)
	}
	return l, nil
}
