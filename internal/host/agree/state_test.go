package agree

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/id"
)

func version(generation, n int) id.Version { return id.Version{Generation: generation, N: n} }

// begun is the state of a job in generation 2 with the plan 2.3.
func begun(t *testing.T) State {
	t.Helper()
	var s State
	for i, e := range []Entry{
		Leader{"a"}, Generation{1}, Job{1, []byte("{}")}, Plan{Version: version(1, 7)}, Generation{2},
		Plan{Version: version(2, 3), Data: []byte("order")},
		Servers{[]Server{{ID: "a", Addr: "here", Voter: true}, {ID: "b"}}},
		Member{"c", "c:1", "c:2", 4}, Member{"d", "d:1", "d:2", 0}, Member{"c", "c:3", "c:4", 2},
	} {
		var err error
		if s, err = s.Apply(uint64(i+1), 5, e); err != nil {
			t.Fatalf("%v: %v", e, err)
		}
	}
	return s
}

func TestStateAccepts(t *testing.T) {
	s := begun(t)
	want := State{
		Index: 10, Term: 5, Leader: "a", Generation: 2, Job: Job{1, []byte("{}")}, Newest: version(2, 3),
		Plans: []Plan{{Version: version(2, 3), Data: []byte("order")}}, Earlier: 1,
		Servers: []Server{{ID: "a", Addr: "here", Voter: true}, {ID: "b"}},
		Members: []Member{{"c", "c:3", "c:4", 2}, {"d", "d:1", "d:2", 0}},
	}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("got\n%+v\nwant\n%+v", s, want)
	}
}

func TestStateRefuses(t *testing.T) {
	for _, c := range []struct {
		name  string
		entry Entry
		class error
	}{
		{"generation again", Generation{2}, ErrStale},
		{"generation before", Generation{-1}, ErrStale},
		{"job of the generation before", Job{1, nil}, ErrStale},
		{"job of the next generation", Job{3, nil}, ErrInvalid},
		{"plan again", Plan{Version: version(2, 3)}, ErrStale},
		{"plan before", Plan{Version: version(2, 2)}, ErrStale},
		{"plan of the generation before", Plan{Version: version(1, 8)}, ErrStale},
		{"plan of the next generation", Plan{Version: version(3, 1)}, ErrInvalid},
		{"plan without version", Plan{}, ErrInvalid},
		{"plan of another term", Plan{Term: 4, Version: version(2, 4)}, ErrStale},
		{"host without a name", Member{"", "c:1", "c:2", 1}, ErrInvalid},
		{"host without an address", Member{"c", "c:1", "", 1}, ErrInvalid},
		{"host of less than no workers", Member{"c", "c:1", "c:2", -1}, ErrInvalid},
		{"no entry", nil, ErrInvalid},
	} {
		s := begun(t)
		after, err := s.Apply(20, 5, c.entry)
		var refusal *RefusedError
		if !errors.As(err, &refusal) || !errors.Is(err, c.class) {
			t.Errorf("%s: error %v, want a refusal that is %v", c.name, err, c.class)
		}
		s.Index = 20
		if !reflect.DeepEqual(s, after) {
			t.Errorf("%s: the state is changed", c.name)
		}
	}
}

// A job has one entry in each generation, and versions go on from 1 in the next.
func TestStateOfNextGeneration(t *testing.T) {
	s := begun(t)
	for i, e := range []Entry{Job{2, []byte("j")}, Generation{5}, Plan{Term: 6, Version: version(5, 1)}} {
		var err error
		if s, err = s.Apply(uint64(20+i), 6, e); err != nil {
			t.Fatalf("%v: %v", e, err)
		}
	}
	if _, err := s.Apply(30, 6, Job{5, nil}); err != nil {
		t.Error(err)
	}
	if s.Newest != version(5, 1) || s.Members != nil {
		t.Errorf("got %+v", s)
	}
}

func TestStateIsBounded(t *testing.T) {
	s, err := State{}.Apply(1, 1, Generation{1})
	for n := 1; n <= 3*MaxPlans && err == nil; n++ {
		s, err = s.Apply(uint64(n), 1, Plan{Version: version(1, n)})
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Plans) != MaxPlans || s.Earlier != 2*MaxPlans || s.Newest != version(1, 3*MaxPlans) || s.Plans[0].Version != version(1, 1) || s.Plans[1].Version != version(1, 2*MaxPlans+2) {
		t.Errorf("%d plans, %d earlier, newest %v", len(s.Plans), s.Earlier, s.Newest)
	}

	for n := range MaxMembers {
		if s, err = s.Apply(1, 1, Member{fmt.Sprint(n), "a:1", "a:2", 1}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Apply(1, 1, Member{"another", "a:1", "a:2", 1}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a host too many: %v", err)
	}

	// Plans that are too large together: the newest stays whatever its size.
	big := make([]byte, MaxData)
	for n := range 8 {
		if s, err = s.Apply(1, 1, Plan{Version: version(1, 100+n), Data: big}); err != nil {
			t.Fatal(err)
		}
	}
	size := 0
	for _, p := range s.Plans {
		size += len(p.Data)
	}
	if size != MaxPlanBytes+MaxData || s.Earlier+len(s.Plans) != 3*MaxPlans+8 || s.Plans[0].Version != version(1, 1) {
		t.Errorf("%d plans of %d bytes, %d earlier", len(s.Plans), size, s.Earlier)
	}
}

// An older state keeps what it had when a newer one is made from it.
func TestStateIsValue(t *testing.T) {
	s := begun(t)
	for _, e := range []Entry{Plan{Version: version(2, 4)}, Servers{[]Server{{ID: "c"}}}, Member{"c", "c:5", "c:6", 1}} {
		for range 2 {
			if _, err := s.Apply(10, 5, e); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !reflect.DeepEqual(s, begun(t)) {
		t.Errorf("changed to %+v", s)
	}
}

func entries() *rapid.Generator[Entry] {
	data := rapid.SliceOf(rapid.Byte())
	return rapid.Custom(func(t *rapid.T) Entry {
		n := func() int { return rapid.Int().Draw(t, "n") }
		switch rapid.IntRange(0, 4).Draw(t, "kind") {
		case 0:
			return Generation{n()}
		case 1:
			return Job{n(), data.Draw(t, "data")}
		case 2:
			return Plan{
				rapid.Uint64().Draw(t, "term"), version(n(), n()), rapid.StringN(0, 50, -1).Draw(t, "reason"),
				data.Draw(t, "data"),
			}
		case 3:
			text := func() string { return rapid.StringN(0, 50, -1).Draw(t, "text") }
			return Member{text(), text(), text(), n()}
		default:
			return Leader{rapid.StringN(0, 50, -1).Draw(t, "id")}
		}
	})
}

func TestEntriesReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := entries().Draw(t, "entry")
		b, err := Encode(e)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Decode(b)
		if err != nil || !reflect.DeepEqual(got, e) {
			t.Fatalf("%#v became %#v, %v", e, got, err)
		}
		for i := range b {
			if _, err := Decode(b[:i]); err == nil {
				t.Fatalf("%d of %d bytes are taken for an entry", i, len(b))
			}
		}
		if _, err := Decode(append(slices.Clone(b), 0)); err == nil {
			t.Fatal("a byte after the end is not noticed")
		}
	})
}

func TestSnapshotsReadBack(t *testing.T) {
	for name, s := range map[string]State{"new": {}, "begun": begun(t)} {
		var b bytes.Buffer
		if err := s.Write(&b); err != nil {
			t.Fatal(err)
		}
		got, err := ReadState(bytes.NewReader(b.Bytes()))
		if err != nil || !reflect.DeepEqual(normal(got), normal(s)) {
			t.Errorf("%s: became\n%+v, %v, want\n%+v", name, got, err, s)
		}
		for i := range b.Bytes() {
			if _, err := ReadState(bytes.NewReader(b.Bytes()[:i])); err == nil {
				t.Fatalf("%s: %d of %d bytes are taken for a snapshot", name, i, b.Len())
			}
		}
		if _, err := ReadState(bytes.NewReader(append(b.Bytes(), 0))); err == nil {
			t.Errorf("%s: a byte after the end is not noticed", name)
		}
	}
}

// normal makes states comparable: no elements are as good as none.
func normal(s State) State {
	s.Plans, s.Servers = append([]Plan(nil), s.Plans...), append([]Server(nil), s.Servers...)
	return s
}

// hostile are bytes that are no entry, or none that can be accepted.
func hostile(t testing.TB) map[string][]byte {
	plan, err := Encode(Plan{Version: version(9, 9), Data: []byte("x")})
	if err != nil {
		t.Fatal(err)
	}
	with := func(i int, b byte) []byte { c := slices.Clone(plan); c[i] = b; return c }
	return map[string][]byte{
		"nothing":           {},
		"format alone":      {format},
		"another format":    with(0, 2),
		"unknown kind":      with(1, 200),
		"kind of snapshots": with(1, byte(kindServers)),
		"another kind":      with(1, byte(kindLeader)),
		"cut short":         plan[:len(plan)-1],
		"something behind":  append(slices.Clone(plan), 0xc0),
		"huge bytes":        {format, byte(kindJob), 1, 0xc6, 0xff, 0xff, 0xff, 0xff, 'x'},
		"huge text":         {format, byte(kindLeader), 0xdb, 0xff, 0xff, 0xff, 0xff, 'x'},
		"nested arrays":     append([]byte{format, byte(kindGeneration)}, bytes.Repeat([]byte{0xdd, 0, 0, 0, 1}, 1<<16)...),
		"text for number":   {format, byte(kindGeneration), 0xa1, '7'},
		"oversized": append([]byte{format, byte(kindJob), 1, 0xc6, 0, 0x80, 0, 1},
			make([]byte, MaxData+1)...),
	}
}

func TestHostileEntriesAreRefused(t *testing.T) {
	for name, data := range hostile(t) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		e, err := Decode(data)
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 4<<20+2*uint64(len(data)) {
			t.Errorf("%s: reading %d bytes allocates %d", name, len(data), got)
		}
		if err != nil {
			continue
		}
		if s, err := (State{}).Apply(3, 2, e); !errors.Is(err, ErrInvalid) || !reflect.DeepEqual(s, State{Index: 3}) {
			t.Errorf("%s: %v; state %+v", name, err, s)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, data := range hostile(f) {
		if len(data) < 1000 {
			f.Add(data)
		}
	}
	for _, e := range []Entry{Generation{1}, Job{1, []byte("{}")}, Plan{Version: version(1, 1)}, Leader{"a"}, Skip{1, 17, 2}} {
		data, err := Encode(e)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := Decode(data)
		if err != nil {
			return
		}
		_, _ = State{}.Apply(1, 1, e) // must not panic
		b, err := Encode(e)
		if err != nil {
			t.Fatalf("%#v is read, and not written: %v", e, err)
		}
		if again, err := Decode(b); err != nil || !reflect.DeepEqual(again, e) {
			t.Fatalf("%#v became %#v, %v", e, again, err)
		}
	})
}

// Skipped samples are in the state until the next generation, and in its snapshots.
func TestSkips(t *testing.T) {
	s, err := State{}.Apply(1, 4, Generation{1})
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		e    Skip
		want error
	}{
		{Skip{4, 17, 0}, nil}, {Skip{4, 17, 0}, ErrStale}, {Skip{0, 17, 1}, nil}, {Skip{3, 18, 0}, ErrStale}, {Skip{4, 18, -1}, ErrInvalid},
	} {
		text, err := Encode(c.e)
		if err != nil {
			t.Fatal(err)
		}
		e, err := Decode(text)
		if err != nil {
			t.Fatal(err)
		}
		if s, err = s.Apply(uint64(2+i), 4, e); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.e, err, c.want)
		}
	}
	var b bytes.Buffer
	if err := s.Write(&b); err != nil {
		t.Fatal(err)
	}
	read, err := ReadState(&b)
	if err != nil || !slices.Equal(read.Skipped(), []uint64{17, 17}) {
		t.Errorf("%+v, %v", read.Skips, err)
	}
	if s, _ = read.Apply(9, 4, Generation{2}); len(s.Skips) > 0 {
		t.Errorf("the next generation has %v", s.Skips)
	}
}
