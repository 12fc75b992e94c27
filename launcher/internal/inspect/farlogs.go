package inspect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/act"
)

// farLogs are the logs on the other machines of a run. The agent of this one brings them while the run goes on; afterwards, their ends are
// in the run directory.
type farLogs struct {
	dir    string
	worker int // -1 for all
	tails  map[control.LogFile]*farTail
	looked time.Time
	faults map[string]bool // that were told
	others bool            // the run is known to have other machines
	found  bool            // some log that is to be shown is there
}

func newFarLogs(dir string, worker int) *farLogs {
	return &farLogs{dir: dir, worker: worker, tails: make(map[control.LogFile]*farTail), faults: make(map[string]bool)}
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

// read calls each, while the run goes on, with every line since the last call, of which worker it is, and what is wrong. With last, also with
// lines without an end.
func (f *farLogs) read(ctx context.Context, last bool, each func(worker int, line []byte) error) (faults []string, err error) {
	if !last && time.Since(f.looked) < lookFar {
		return nil, nil
	}
	f.looked = time.Now()
	if !f.others {
		now, err := rundir.ReadWorkers(f.dir)
		if f.others = err == nil && now.Host != ""; !f.others {
			return nil, nil //nolint:nilerr // the run has ended just now
		}
	}
	found, err := f.ask(ctx, control.ReadLog{Worker: -1})
	if err != nil {
		return f.news(err.Error()), nil //nolint:nilerr // what is here is shown all the same
	}
	faults = f.news(found.Err)
	for _, l := range found.Logs {
		if f.worker >= 0 && l.Worker != f.worker {
			continue
		}
		f.found = true
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
		if last {
			if err := t.end(func(line []byte) error { return each(l.Worker, line) }); err != nil {
				return faults, err
			}
		}
	}
	return faults, nil
}

// rest calls each, when the run has ended, with the lines that were not read before, and returns which logs are not here.
func (f *farLogs) rest(each func(worker int, line []byte) error) (missing []string, err error) {
	all, err := rundir.ReadOthers(f.dir)
	if err != nil {
		return nil, err
	}
	for _, l := range all.Logs {
		if f.worker >= 0 && l.Worker != f.worker || f.own(l) {
			continue
		}
		f.found = true
		t := f.tails[control.LogFile{Host: l.Host, Worker: l.Worker, Incarnation: l.Incarnation}]
		if t == nil {
			t = new(farTail)
		}
		if t.at < l.From {
			missing = append(missing, fmt.Sprintf("%s: bytes %d to %d of the log of worker %d are in its own run directory", l.Host, t.at, l.From, l.Worker))
			t.at = l.From
		}
		show := func(line []byte) error { return each(l.Worker, line) }
		if err := t.lines(l.Text[min(t.at-l.From, int64(len(l.Text))):], show); err != nil {
			return missing, err
		}
		if err := t.end(show); err != nil {
			return missing, err
		}
	}
	if f.worker < 0 || !f.found {
		missing = append(missing, all.Notes...)
	}
	return missing, nil
}

// own reports whether a log is one of this machine, whose logs are whole here.
func (f *farLogs) own(l rundir.OtherLog) bool {
	file, err := rundir.Open(filepath.Join(f.dir, "log", fmt.Sprintf("worker-%d.%d.log", l.Worker, l.Incarnation)))
	if err != nil {
		return false
	}
	defer file.Close()
	text := make([]byte, len(l.Text))
	n, _ := file.ReadAt(text, l.From) // what cannot be read is another log
	return bytes.Equal(text[:n], l.Text)
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

// end takes in that no more comes.
func (t *farTail) end(each func([]byte) error) error {
	if len(t.rest) == 0 {
		return nil
	}
	line := append(t.rest, '\n')
	t.rest = nil
	return each(line)
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
