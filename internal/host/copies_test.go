package host

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// elected is a log of which the term alone counts.
type elected struct {
	agree.Log
	term uint64
}

func (e elected) Term() uint64 { return e.term }

func newConcluding(term uint64) *lead {
	c := &Config{Last: func(uint64, session.Outcome) []byte { return nil }}
	c.Detect = time.Second
	return &lead{c: c, log: elected{term: term}, term: 3, told: newAudience()}
}

// At the end a leader waits for a host that is slow to take it in as long as it hears that host, and not for one that is silent.
func TestEndIsHeard(t *testing.T) {
	for _, c := range []struct {
		name        string
		beats, want time.Duration
	}{
		{"slow", 3 * time.Second, 3 * time.Second},
		{"silent", 100 * time.Millisecond, 1100 * time.Millisecond},
		{"for ever", time.Hour, timing.Drain},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, q := newConcluding(3), newQueue[control.Message]()
				l.told.enter(q)
				began, ended := time.Now(), make(chan struct{})
				go func() {
					defer close(ended)
					l.conclude(session.Outcome{})
				}()
				beat := time.NewTicker(timing.HostHeartbeat)
				defer beat.Stop()
				for at := time.Duration(0); at < c.beats; at = time.Since(began) {
					select {
					case <-beat.C:
						l.told.hear(q)
						continue
					case <-ended:
					}
					break
				}
				if c.name == "slow" {
					l.told.leave(q)
				}
				<-ended
				if took := time.Since(began); took < c.want || took > c.want+2*timing.HostHeartbeat {
					t.Errorf("it took %v, want %v", took, c.want)
				}
			})
		})
	}
}

// A leader whose successor was elected while it told the end of the run is in doubt: the other hosts have ended their links to it for the
// new leader, perhaps before they heard, and may need its vote until that one has concluded the run.
func TestEndInDoubt(t *testing.T) {
	whole := session.Outcome{Summary: &rundir.Summary{}}
	for _, c := range []struct {
		term uint64
		out  session.Outcome
		want bool
	}{
		{3, whole, false},
		{4, whole, true},
		{4, session.Outcome{}, false}, // it could not lead
	} {
		if got := newConcluding(c.term).conclude(c.out); got != c.want {
			t.Errorf("term %d, %+v: %v", c.term, c.out, got)
		}
	}
}

// Where the run directory of a host is removed, it is made again, and all records are asked for, at most once a second.
func TestCopiesOfARemovedDirectory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "run")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		var said []string
		k := &copies{dir: dir, waits: func(text string) { said = append(said, text) }}
		part := func(at int64) rundir.Part {
			return rundir.Part{Name: "metrics.jsonl", At: at, Data: []byte("{}\n")}
		}
		if !k.keep(1, part(0)) || !k.keep(1, part(3)) {
			t.Error("it is not kept")
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if k.keep(1, part(6)) {
			t.Error("the directory is removed, and no more is asked for")
		}
		if !k.keep(1, part(9)) { // still on the old link
			t.Error("all is asked for again at once")
		}
		if marks := k.marks(); len(marks) > 0 && marks[0].Size > 0 || !k.keep(1, part(0)) || !k.keep(1, part(3)) {
			t.Errorf("%+v; the new link's parts are not kept", marks)
		}
		if err := os.Remove(filepath.Join(dir, "metrics.jsonl")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(timing.Disk)
		if k.keep(1, part(6)) {
			t.Error("a record is removed, and no more is asked for")
		}
		if _, err := os.Stat(filepath.Join(dir, "log")); err != nil || len(said) != 2 {
			t.Errorf("%v, %q", err, said)
		}
	})
}

// Where a host's run directory takes no copies, they are asked for again once it does, over one new link.
func TestCopiesWhereNoneAreTaken(t *testing.T) {
	for name, c := range map[string]struct{ at, of string }{
		"a file in place of the directory": {"", "metrics.jsonl"},
		"a folder in place of a record":    {"plans.jsonl", "plans.jsonl"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "run")
				if err := os.Mkdir(dir, 0o700); err != nil {
					t.Fatal(err)
				}
				said := 0
				k := &copies{dir: dir, waits: func(string) { said++ }}
				part := func(name string, at int64) rundir.Part {
					return rundir.Part{Name: name, At: at, Data: []byte("{}\n")}
				}
				if !k.keep(1, part("metrics.jsonl", 0)) {
					t.Error("it is not kept")
				}
				var err error
				if c.at == "" {
					err = errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600))
				} else {
					err = os.MkdirAll(filepath.Join(dir, c.at, "x"), 0o700)
				}
				if err != nil {
					t.Fatal(err)
				}
				for i := range 4 {
					if !k.keep(1, part(c.of, 0)) || c.at != "" && !k.keep(1, part("metrics.jsonl", 3)) {
						t.Errorf("%d: all is asked for while it cannot be kept", i)
					}
					time.Sleep(timing.Disk)
				}
				if err := errors.Join(os.RemoveAll(filepath.Join(dir, c.at)), os.MkdirAll(dir, 0o700)); err != nil {
					t.Fatal(err)
				}
				if k.keep(1, part("events.jsonl", 0)) {
					t.Error("what was not kept is not asked for")
				}
				if k.marks(); !k.keep(1, part("metrics.jsonl", 0)) || said != 1 {
					t.Errorf("the new link's parts are not kept; it was said %d times", said)
				}
			})
		})
	}
}

// A rollback and a host that takes over wait for a run directory that is away, and for no longer than it may be.
func TestUntilDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "run")
		noted := 0
		post := func(e session.Event) bool {
			if _, ok := e.(session.Noted); ok {
				noted++
			}
			return true
		}
		begun := time.Now()
		if v := verifyFiles(t.Context(), dir, rundir.Only("p"), session.Propose{}, post); v.Err == nil || time.Since(begun) != timing.DirReturns {
			t.Errorf("%+v after %v", v, time.Since(begun))
		}
		time.AfterFunc(3*time.Second/2, func() { _ = os.Mkdir(dir, 0o700) })
		if v := verifyFiles(t.Context(), dir, rundir.Only("p"), session.Propose{}, post); v.Err != nil || v.Step != 0 || noted != 2 {
			t.Errorf("%+v, said %d times", v, noted)
		}
	})
}
