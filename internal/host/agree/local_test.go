package agree

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/timing"
)

// The host leads at once, and an entry that is refused changes nothing.
func TestLocal(t *testing.T) {
	for _, dir := range []string{"", t.TempDir()} {
		l, err := OpenLocal(dir, "a", 0)
		if err != nil {
			t.Fatal(err)
		}
		if lead := <-l.Changes(); !lead.Ready || lead.Leader != "a" || lead != l.Leadership() || lead.Term != l.Term() {
			t.Errorf("leadership %+v", lead)
		}
		index, err := l.Propose(t.Context(), Plan{Term: l.Term(), Version: version(1, 1)})
		if s := l.State(); err != nil || s.Index != index || s.Newest != version(1, 1) || s.Generation != 1 {
			t.Errorf("index %d, %v; state %+v", index, err, s)
		}
		before := l.State()
		for _, e := range []Entry{Plan{Version: version(1, 1)}, Plan{Version: version(2, 1)}, Plan{Term: 9, Version: version(1, 2)}, Generation{1}} {
			var refusal *RefusedError
			if _, err := l.Propose(t.Context(), e); !errors.As(err, &refusal) || !reflect.DeepEqual(l.State(), before) {
				t.Errorf("%v: %v; state %+v", e, err, l.State())
			}
		}
		if err := errors.Join(l.Sync(), l.Close(), l.Close()); err != nil {
			t.Error(err)
		}
		if _, open := <-l.Changes(); open {
			t.Error("after Close there is another leadership")
		}
		if _, err := l.Propose(t.Context(), Plan{Version: version(1, 2)}); !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
}

// Wherever a process was killed, the next one has a prefix of the log, and a generation that is in no log.
func TestLocalIsCutOff(t *testing.T) {
	dir := t.TempDir()
	var states []State
	var ends []int64
	l, err := OpenLocal(dir, "a", 6)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, localFile)
	note := func() {
		t.Helper()
		if err := l.Sync(); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		states, ends = append(states, l.State()), append(ends, info.Size())
	}
	note()
	for _, e := range []Entry{Job{7, []byte("{}")}, Plan{Version: version(7, 1), Data: []byte("one")}, Plan{Version: version(7, 2), Data: []byte("two")}} {
		if _, err := l.Propose(t.Context(), e); err != nil {
			t.Fatal(err)
		}
		note()
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for size := range len(whole) + 1 {
		for _, damage := range []bool{false, true} {
			text := append([]byte{}, whole[:size]...)
			if damage {
				text = append(text, 0xff, 1, 2, 3, 4, 5, 6, 7, 8, 9)
			}
			again := t.TempDir()
			if err := os.WriteFile(filepath.Join(again, localFile), text, 0o600); err != nil {
				t.Fatal(err)
			}
			l, err := OpenLocal(again, "a", 0)
			if err != nil {
				t.Fatal(err)
			}
			want := State{Term: localTerm, Leader: "a"}
			for i, end := range ends {
				if end <= int64(size) {
					want = states[i]
				}
			}
			got := l.State()
			if got.Generation != want.Generation+1 || got.Newest != want.Newest || !reflect.DeepEqual(got.Plans, want.Plans) || got.Index != want.Index+1 {
				t.Fatalf("%d bytes of %d, damage %v: %+v, want the state after %+v", size, len(whole), damage, got, want)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// slowDisk writes, and syncs when it is told how that ends.
type slowDisk struct {
	io.Writer
	end chan error

	mu     sync.Mutex
	synced int
}

func (d *slowDisk) WriteAt(b []byte, _ int64) (int, error) { return d.Write(b) }

func (d *slowDisk) Sync() error {
	err := <-d.end
	d.mu.Lock()
	defer d.mu.Unlock()
	d.synced++
	return err
}

func (d *slowDisk) Close() error { return nil }

func (d *slowDisk) syncs() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.synced
}

func onDisk(t *testing.T, d *slowDisk) *Local {
	t.Helper()
	l, err := OpenLocal("", "a", 0)
	if err != nil {
		t.Fatal(err)
	}
	l.attach(d)
	return l
}

// Plans do not wait for the disk, unless very many do; other entries do.
func TestLocalWritesBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &slowDisk{Writer: io.Discard, end: make(chan error)}
		l := onDisk(t, d)
		for i := range maxBehind {
			if _, err := l.Propose(t.Context(), Plan{Version: version(1, i+1)}); err != nil {
				t.Fatal(err)
			}
		}
		if s := l.State(); d.syncs() > 0 || s.Newest != version(1, maxBehind) {
			t.Fatalf("%d syncs; newest plan %v", d.syncs(), s.Newest)
		}
		done := make(chan error, 2)
		go func() {
			_, err := l.Propose(context.Background(), Plan{Version: version(1, maxBehind+1)})
			done <- err
			_, err = l.Propose(context.Background(), Generation{2})
			done <- err
		}()
		synctest.Wait()
		select {
		case <-done:
			t.Fatal("more is pending than there may be")
		default:
		}
		d.end <- nil
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case <-done:
			t.Fatal("a generation counts before it is on the disk")
		default:
		}
		close(d.end)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// A disk that fails takes nothing more, and the log says why to all callers.
func TestLocalOnAFailingDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := errors.New("no space left")
		d := &slowDisk{Writer: io.Discard, end: make(chan error, 1)}
		l := onDisk(t, d)
		d.end <- full
		if _, err := l.Propose(t.Context(), Plan{Version: version(1, 1)}); err != nil {
			t.Fatal(err)
		}
		<-l.Broken()
		_, plan := l.Propose(t.Context(), Plan{Version: version(1, 2)})
		_, generation := l.Propose(t.Context(), Generation{2})
		for _, err := range []error{plan, generation, l.Sync(), l.Close()} {
			if !errors.Is(err, full) {
				t.Errorf("%v, want %v", err, full)
			}
		}
	})
}

// What is no entry is said, once.
func TestLocalSaysWhatItDrops(t *testing.T) {
	for _, garbage := range []string{"", "x", "\xff\xff\xff\xff\xff\xff\xff\xffgarbage", string(make([]byte, 1<<16))} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, localFile), []byte(garbage), 0o600); err != nil {
			t.Fatal(err)
		}
		for again := range 2 {
			l, err := OpenLocal(dir, "a", 6)
			if err != nil {
				t.Fatal(err)
			}
			if want := garbage != "" && again == 0; (l.Dropped() != "") != want || l.State().Generation != 7+again {
				t.Errorf("%.10q, time %d: %q, generation %d", garbage, again, l.Dropped(), l.State().Generation)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, localFile), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenLocal(dir, "a", 0); err == nil || !strings.Contains(err.Error(), filepath.Join(dir, localFile)) {
		t.Errorf("of a pipe: %v", err)
	}
}

// fullDisk takes nothing more while it is full, after half of what it was given.
type fullDisk struct {
	mu   sync.Mutex
	full bool
	data []byte
}

func (d *fullDisk) WriteAt(b []byte, at int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := len(b)
	if d.full {
		n /= 2
	}
	d.data = append(d.data[:at:at], b[:n]...)
	if d.full {
		return n, unix.ENOSPC
	}
	return n, nil
}

func (d *fullDisk) Sync() error  { return nil }
func (d *fullDisk) Close() error { return nil }

func (d *fullDisk) fill(full bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.full = full
}

// A log waits for room on its disk, and then has all entries. It does not keep its caller from ending.
func TestLocalOnAFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := new(fullDisk)
		l, err := OpenLocal("", "a", 0)
		if err != nil {
			t.Fatal(err)
		}
		l.attach(d)
		if _, err := l.Propose(t.Context(), Generation{2}); err != nil {
			t.Fatal(err)
		}
		d.fill(true)
		for n := range 3 {
			if _, err := l.Propose(t.Context(), Plan{Version: version(2, n+1)}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * timing.Disk)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := l.Propose(ctx, Job{2, []byte("{}")}); !errors.Is(err, ErrUncertain) {
			t.Errorf("%v", err)
		}
		select {
		case <-l.Broken():
			t.Fatal("the log is broken")
		default:
		}
		d.fill(false)
		if err := errors.Join(l.Sync(), l.Close()); err != nil {
			t.Error(err)
		}
		var again Local
		if end := again.replay(bytes.NewReader(d.data)); end != int64(len(d.data)) || again.state.Newest != version(2, 3) || again.state.Job.Generation != 2 {
			t.Errorf("%d of %d bytes, %+v", end, len(d.data), again.state)
		}
		l, err = OpenLocal("", "a", 0)
		if err != nil {
			t.Fatal(err)
		}
		l.attach(d)
		d.fill(true)
		if _, err := l.Propose(t.Context(), Plan{Version: version(1, 1)}); err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("closed on a full disk: %v", err)
		}
	})
}

// Whatever a log file holds, its whole entries are read and the rest is cut off: what is left opens to the same state.
func FuzzLocal(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{255, 255, 255, 255, 0, 0, 0, 0, 1})
	for _, n := range []int{1, 3} {
		dir := f.TempDir()
		l, err := OpenLocal(dir, "a", 0)
		if err != nil {
			f.Fatal(err)
		}
		for i := range n {
			if _, err := l.Propose(f.Context(), Plan{Term: l.Term(), Version: version(1, i+1), Data: []byte("plan")}); err != nil {
				f.Fatal(err)
			}
		}
		if err := l.Close(); err != nil {
			f.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, localFile))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		l := &Local{state: State{Term: localTerm, Leader: "a"}}
		end := l.replay(bytes.NewReader(text))
		if end < 0 || end > int64(len(text)) {
			t.Fatalf("%d bytes are whole, of %d", end, len(text))
		}
		again := &Local{state: State{Term: localTerm, Leader: "a"}}
		if got := again.replay(bytes.NewReader(text[:end])); got != end || !reflect.DeepEqual(again.state, l.state) {
			t.Fatalf("%d bytes with %+v became %d with %+v", end, l.state, got, again.state)
		}
	})
}

// Whatever is there in the place of a snapshot is a state that is written as it was read, or an error.
func FuzzReadState(f *testing.F) {
	s := State{Term: 1, Leader: "a"}
	for i, e := range []Entry{Generation{1}, Job{1, []byte("{}")}, Leader{"a"}} {
		s, _ = s.Apply(uint64(i+1), 1, e)
		var b bytes.Buffer
		if err := s.Write(&b); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := ReadState(bytes.NewReader(text))
		if err != nil {
			return
		}
		var b bytes.Buffer
		if err := s.Write(&b); err != nil {
			t.Fatalf("%+v is read, and not written: %v", s, err)
		}
		if again, err := ReadState(&b); err != nil || !reflect.DeepEqual(again, s) {
			t.Fatalf("%+v became %+v, %v", s, again, err)
		}
	})
}
