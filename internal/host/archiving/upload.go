package archiving

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/parts"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/timing"
)

// Uploads has other hosts copy their files of checkpoints to the target.
type Uploads struct {
	// Dial connects to another host, which calls Serve there.
	Dial func(ctx context.Context, host string) (*control.Conn, error)
	// Note tells people that a host could not do it, so that its files come to this one first. It may be called by several goroutines.
	Note func(text string)

	mu   sync.Mutex
	said map[string]bool // notes
}

// Put has a host copy files of a checkpoint below a prefix, and returns those that are there then.
func (u *Uploads) Put(ctx context.Context, host, prefix string, m *checkpoint.Manifest, files []int) (there []int) {
	ask := control.Upload{Protocol: control.Protocol, Step: m.Step, Prefix: prefix}
	for _, i := range files {
		ask.Files = append(ask.Files, control.Uploading{Name: m.Files[i].Name, SHA256: m.Files[i].SHA256})
	}
	there, err := u.ask(ctx, host, ask, files)
	if err != nil && ctx.Err() == nil {
		u.note(fmt.Sprintf("%s does not copy its files of checkpoints to the target: %s", host, strings.Join(strings.Fields(err.Error()), " ")))
	}
	return there
}

func (u *Uploads) ask(ctx context.Context, host string, ask control.Upload, files []int) (there []int, err error) {
	conn, err := u.Dial(ctx, host)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err := conn.Send(ask); err != nil {
		return nil, err
	}
	var failed error
	for {
		m, err := parts.Next(ctx, conn)
		if err != nil {
			return there, err
		}
		up, ok := m.(control.Uploaded)
		if !ok {
			return there, fmt.Errorf("it answers with %T", m)
		}
		at := slices.IndexFunc(ask.Files, func(f control.Uploading) bool { return f.Name == up.Name })
		switch {
		case up.Err != "":
			failed = errors.New(up.Err)
		case at >= 0 && !slices.Contains(there, files[at]):
			there = append(there, files[at])
		}
		if up.Over {
			return there, failed
		}
	}
}

// note says something once.
func (u *Uploads) note(text string) {
	u.mu.Lock()
	said := u.said[text]
	if u.said == nil {
		u.said = make(map[string]bool)
	}
	const most = 64
	if u.said[text] = true; len(u.said) > most {
		said = true
	}
	u.mu.Unlock()
	if !said {
		u.Note(text)
	}
}

// Serve copies files of a checkpoint in the run directory dir to the target, for the host that leads, as long as that stays connected.
func Serve(ctx context.Context, conn *control.Conn, m control.Upload, dir string, to archive.Bucket) {
	ctx, cancel := context.WithCancel(ctx)
	answers := make(chan control.Uploaded)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	work.Go(func() {
		defer cancel()
		_, _ = conn.Receive(ctx) // nothing comes: the other side has ended, or the work has
	})
	work.Go(func() {
		defer close(answers)
		last := control.Uploaded{Over: true}
		if err := upload(ctx, m, dir, to, func(name string) { answers <- control.Uploaded{Name: name} }); err != nil {
			last.Err = err.Error()
		}
		answers <- last
	})
	tick := time.NewTicker(timing.Handshake / 4)
	defer tick.Stop()
	for {
		var answer control.Uploaded
		select {
		case a, more := <-answers:
			if !more {
				return
			}
			answer = a
		case <-tick.C:
		}
		if !parts.Answer(conn, answer) {
			cancel()
		}
	}
}

func upload(ctx context.Context, m control.Upload, dir string, to archive.Bucket, done func(name string)) error {
	if to == nil {
		return errors.New("it has no target")
	}
	r, err := checkpoint.Open(dir, m.Step)
	if err != nil {
		return err
	}
	defer r.Close()
	has := r.Manifest().Files
	var files []int
	for _, f := range m.Files {
		at := slices.IndexFunc(has, func(h checkpoint.File) bool { return h.Name == f.Name && h.SHA256 == f.SHA256 })
		if at < 0 {
			return fmt.Errorf("%s of step %d is not what is here", f.Name, m.Step)
		}
		if err := r.VerifyFile(ctx, at); err != nil { // and so all stay open
			return err
		}
		files = append(files, at)
	}
	for _, i := range files {
		if err := archive.PutFile(ctx, to, r, m.Prefix, i); err != nil {
			return err
		}
		done(has[i].Name)
	}
	return nil
}
