package progress

import (
	"os"
	"reflect"
	"testing"
	"time"
)

func TestRecord(t *testing.T) {
	began := time.Now()
	agent, f, err := Create()
	if err != nil {
		t.Fatal(err)
	}
	defer agent.Close()
	worker, err := Open(f)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if s := agent.State(); !reflect.DeepEqual(s, State{}) {
		t.Errorf("a record begins with %+v", s)
	}
	worker.Begin(0, 1, Pair{0, 7}, true)
	worker.End(0)
	if s := agent.State(); s.Since != 0 {
		t.Errorf("the time is not wanted, and it is %v", s.Since)
	}
	worker.Time()
	worker.Begin(0, 2, Pair{1, 3}, true)
	worker.End(0)
	worker.Begin(0, 2, Pair{1, 4}, true)
	worker.End(0)
	worker.Begin(0, 2, Pair{1, 3}, false)
	worker.Begin(1, 2, Pair{0, 2}, true)
	worker.Begin(Lanes-1, 2, Pair{0, 5}, true)
	worker.Begin(2, 2, Pair{0, 6}, true)
	worker.End(2)
	if err := worker.Close(); err != nil { // as death does
		t.Fatal(err)
	}
	got := agent.State()
	if since := time.Unix(0, got.Since); since.Before(began) || since.After(time.Now()) {
		t.Errorf("it began at %v, the test at %v", since, began)
	}
	got.Since = 0
	want := State{Step: 2, Begun: []Pair{{1, 3}, {1, 4}, {0, 2}, {0, 5}, {0, 6}}, Running: &Pair{1, 3}, Beside: []Pair{{0, 2}, {0, 5}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if all := got.All(); !reflect.DeepEqual(all, []Pair{{1, 3}, {0, 2}, {0, 5}}) {
		t.Errorf("all that ran: %v", all)
	}
}

func TestBounds(t *testing.T) {
	r, f, err := Create()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer f.Close()
	for m := range maxPairs + 5 {
		r.Begin(0, 1, Pair{0, m}, true)
	}
	if n := len(r.State().Begun); n != maxPairs {
		t.Errorf("%d pairs", n)
	}
	for i := range r.words[:firstPair] { // a worker gone mad
		r.words[i] = 1<<64 - 1
	}
	_ = r.State()
	other, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := Open(other); err == nil {
		t.Error("an empty file was opened")
	}
	var none *Record
	none.Begin(0, 1, Pair{}, true)
	none.End(0)
	if err := none.Close(); err != nil || none.State().Step != 0 {
		t.Error("a nil record does something")
	}
}

// Whatever a worker left in the record, it is read, and bounded.
func FuzzState(f *testing.F) {
	f.Add([]byte{}, uint64(0))
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1}, uint64(1<<63))
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 255}, ^uint64(0))
	r, file, err := Create()
	if err != nil {
		f.Fatal(err)
	}
	file.Close()
	f.Cleanup(func() { r.Close() })
	f.Fuzz(func(t *testing.T, mem []byte, count uint64) {
		clear(r.mem)
		copy(r.mem, mem)
		r.words[wordCount] = count
		if s := r.State(); s.Step < 0 || len(s.Begun) > maxPairs {
			t.Fatalf("step %d, %d pairs", s.Step, len(s.Begun))
		}
	})
}
