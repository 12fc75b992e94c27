package archiving

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// target is a bucket of which only Put is used.
type target struct {
	archive.Bucket
	take time.Duration // of each Put
	err  error
	puts []string
}

func (b *target) Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error {
	select {
	case <-time.After(b.take):
	case <-ctx.Done():
		return ctx.Err()
	}
	if n, err := io.Copy(io.Discard, content); err != nil || n != size {
		return errors.Join(err, io.ErrShortWrite)
	}
	if b.err == nil {
		b.puts = append(b.puts, name)
	}
	return b.err
}

// saved makes a checkpoint of two files.
func saved(t *testing.T, dir string) *checkpoint.Manifest {
	t.Helper()
	m := checkpoint.Manifest{Job: rundir.Job{Program: "gpt", Model: "gpt", Steps: 9}.Plain().ID(), Step: 7, Plan: id.Version{Generation: 1, N: 1}, Rule: "sgd", Layers: []int{20}}
	for w := range 2 {
		s := checkpoint.Shard{Range: id.Range{Lo: 10 * w, Hi: 10 * (w + 1)}, Params: make([]float32, 10), Moments: [][]float32{make([]float32, 10)}}
		f, err := checkpoint.Write(t.Context(), dir, checkpoint.Part{Job: m.Job, Step: m.Step, Plan: m.Plan, Worker: w, Rule: m.Rule, Shards: []checkpoint.Shard{s}})
		if err != nil {
			t.Fatal(err)
		}
		m.Files = append(m.Files, f)
	}
	if err := checkpoint.Commit(dir, m); err != nil {
		t.Fatal(err)
	}
	return &m
}

// A host copies what it is asked for, as long as that takes; what it cannot copy, the one that asks is told.
func TestUploads(t *testing.T) {
	const prefix = "shards/step-00000007/00000001-0123456789abcdef/"
	for _, c := range []struct {
		name   string
		to     *target
		prefix string
		alter  func(*checkpoint.Manifest)
		there  []int
		noted  string
	}{
		{"all", &target{}, prefix, nil, []int{0, 1}, ""},
		{"slowly", &target{take: 10 * timing.Handshake}, prefix, nil, []int{0, 1}, ""},
		{"no target", nil, prefix, nil, nil, "b does not copy its files of checkpoints to the target: it has no target"},
		{"full", &target{err: errors.New("quota\nexceeded")}, prefix, nil, nil, "quota exceeded"},
		{"elsewhere", &target{}, "claims/", nil, nil, "is no place for files of a checkpoint"},
		{"another file", &target{}, prefix, func(m *checkpoint.Manifest) { m.Files[1].SHA256 = m.Files[0].SHA256 }, nil, "of step 7 is not what is here"},
		{"another step", &target{}, prefix, func(m *checkpoint.Manifest) { m.Step = 8 }, nil, "step-00000008"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			m := saved(t, dir)
			if c.alter != nil {
				m.Files = slices.Clone(m.Files)
				c.alter(m)
			}
			synctest.Test(t, func(t *testing.T) {
				var notes []string
				var bucket archive.Bucket
				if c.to != nil {
					bucket = c.to
				}
				u := Uploads{Note: func(text string) { notes = append(notes, text) }, Dial: func(ctx context.Context, _ string) (*control.Conn, error) {
					return serve(t, func(conn *control.Conn, m control.Upload) { Serve(ctx, conn, m, dir, bucket) }), nil
				}}
				for range 2 { // it is told once
					there := u.Put(t.Context(), "b", c.prefix, m, []int{0, 1})
					if slices.Sort(there); !slices.Equal(there, c.there) {
						t.Errorf("%d are there, want %d", there, c.there)
					}
				}
				if c.noted == "" != (len(notes) == 0) || c.noted != "" && (len(notes) != 1 || !strings.Contains(notes[0], c.noted)) {
					t.Errorf("%q, want %q", notes, c.noted)
				}
				if c.there != nil && (len(c.to.puts) != 4 || c.to.puts[0] != prefix+m.Files[0].Name) {
					t.Errorf("%q", c.to.puts)
				}
			})
		})
	}
}

// serve returns a connection to a host that hears one Upload.
func serve(t *testing.T, f func(conn *control.Conn, m control.Upload)) *control.Conn {
	here, there := net.Pipe()
	go func() {
		conn := control.New(there)
		defer conn.Close()
		m, err := conn.Receive(context.Background())
		if up, ok := m.(control.Upload); ok {
			f(conn, up)
		} else {
			t.Error(m, err)
		}
	}()
	return control.New(here)
}

// A host that says nothing any more is not waited for, and one that is not needed any more stops.
func TestUploadsEnd(t *testing.T) {
	dir := t.TempDir()
	m := saved(t, dir)
	synctest.Test(t, func(t *testing.T) {
		u := Uploads{Note: func(string) {}, Dial: func(context.Context, string) (*control.Conn, error) {
			return serve(t, func(conn *control.Conn, _ control.Upload) { _, _ = conn.Receive(context.Background()) }), nil
		}}
		began := time.Now()
		if there := u.Put(t.Context(), "b", "", m, []int{0}); len(there) > 0 || time.Since(began) != timing.Handshake {
			t.Errorf("%d after %v", there, time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		ended := make(chan time.Duration, 1)
		u.Dial = func(context.Context, string) (*control.Conn, error) {
			return serve(t, func(conn *control.Conn, m control.Upload) {
				Serve(context.Background(), conn, m, dir, &target{take: time.Hour})
				ended <- time.Since(began)
			}), nil
		}
		began = time.Now()
		if there := u.Put(ctx, "b", "shards/step-00000007/00000001-0123456789abcdef/", m, []int{0}); len(there) > 0 || time.Since(began) != time.Minute {
			t.Errorf("%d after %v", there, time.Since(began))
		}
		if at := <-ended; at != time.Minute {
			t.Errorf("the host ends after %v", at)
		}
	})
}
