package ring

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/elastic/plan"
)

func TestValidate(t *testing.T) {
	good := Config{Self: worker(0, 0)}
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   []string // beginnings of the lines
	}{
		{"good", func(*Config) {}, nil},
		{"least", func(c *Config) { c.Detect, c.Members = 90*time.Millisecond, 10 }, nil},
		{"elsewhere with a key", func(c *Config) { c.Listen, c.SecretKey = "192.0.2.1:0", make([]byte, 16) }, nil},
		{"elsewhere", func(c *Config) { c.Listen = "192.0.2.1:0" }, []string{"ring.Config.Listen is"}},
		{"everywhere", func(c *Config) { c.Listen, c.SecretKey = ":0", make([]byte, 16) }, []string{"ring.Config.Listen is"}},
		{"everywhere by number", func(c *Config) { c.Listen, c.SecretKey = "0.0.0.0:0", make([]byte, 16) }, []string{"ring.Config.Listen is"}},
		{"too soon", func(c *Config) { c.Detect, c.Members = 149*time.Millisecond, 1000 },
			[]string{"ring.Config.Detect is 149ms; with Members 1000 it must be at least 150ms"}},
		{"all", func(c *Config) {
			*c = Config{
				Self: Identity{Worker: -1, Incarnation: -1, Host: "a b", Addr: "\n", Plan: plan.Version{N: -1}}, Job: strings.Repeat("j", 256),
				Listen: "x", SecretKey: []byte("short"), Detect: -1, Members: 1,
			}
		}, []string{
			"ring.Config.Self.Kind", "ring.Config.Self.Worker", "ring.Config.Self.Incarnation", "ring.Config.Self.Host", "ring.Config.Self.Addr",
			"ring.Config.Self.Plan", "ring.Config.Job", "ring.Config.SecretKey has 5 bytes; it must have 16, 24 or 32", "ring.Config.Listen",
			"ring.Config.Members",
		}},
	} {
		cfg := good
		c.change(&cfg)
		var got []string
		if err := cfg.Validate(); err != nil {
			got = strings.Split(err.Error(), "\n")
		}
		if !slices.EqualFunc(got, c.want, strings.HasPrefix) {
			t.Errorf("%s: faults %q, want %q", c.name, got, c.want)
		}
		if len(c.want) > 0 {
			if _, err := Open(cfg); err == nil {
				t.Errorf("%s: opened", c.name)
			}
		}
	}
	if got := good.Interval(); got < 87*time.Millisecond || got > 88*time.Millisecond {
		t.Errorf("default interval is %v", got)
	}
}

func identity() *rapid.Generator[Identity] {
	text := func(t *rapid.T, name string, least, most int) string {
		return string(rapid.SliceOfN(rapid.ByteRange('!', '~'), least, most).Draw(t, name))
	}
	return rapid.Custom(func(t *rapid.T) Identity {
		i := Identity{
			Kind: rapid.SampledFrom([]Kind{Worker, Agent}).Draw(t, "kind"), Incarnation: rapid.IntRange(0, math.MaxInt).Draw(t, "incarnation"),
			Host: text(t, "host", 1, MaxHost), Addr: text(t, "addr", 0, MaxAddr),
			Plan: plan.Version{Generation: rapid.IntRange(0, math.MaxInt).Draw(t, "generation"), N: rapid.IntRange(0, math.MaxInt).Draw(t, "n")},
		}
		if i.Kind == Worker {
			i.Worker = plan.WorkerID(rapid.IntRange(0, math.MaxInt).Draw(t, "worker"))
		}
		return i
	})
}

func TestIdentityRoundTrip(t *testing.T) {
	most := Identity{
		Kind: Worker, Worker: math.MaxInt, Incarnation: math.MaxInt, Host: strings.Repeat("h", MaxHost), Addr: strings.Repeat("a", MaxAddr),
		Plan: plan.Version{Generation: math.MaxInt, N: math.MaxInt},
	}
	if n := len(most.encode()); n > memberlist.MetaMaxSize {
		t.Errorf("the largest metadata have %d bytes, more than %d", n, memberlist.MetaMaxSize)
	}
	rapid.Check(t, func(t *rapid.T) {
		want := identity().Draw(t, "identity")
		got, err := decodeIdentity(want.encode())
		if err != nil || got != want {
			t.Fatalf("%+v becomes %+v, %v", want, got, err)
		}
		if lives(want.Name()) != want.key() {
			t.Fatalf("name %q is of lives %q, want %q", want.Name(), lives(want.Name()), want.key())
		}
	})
}

func FuzzIdentity(f *testing.F) {
	f.Add(worker(3, 1).encode())
	f.Add([]byte{0x98, 1, 0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		i, err := decodeIdentity(b)
		if err != nil {
			return
		}
		if again, err := decodeIdentity(i.encode()); err != nil || again != i {
			t.Errorf("%+v becomes %+v, %v", i, again, err)
		}
	})
}

func FuzzPacket(f *testing.F) {
	suspect := []byte("\x03\x83\xabIncarnation\x05\xa4Node\xa3abc\xa4From\xa1x")
	f.Add(suspect)
	f.Add(append([]byte{checksumType, 0, 0, 0, 0, compoundType, 1, 0, byte(len(suspect))}, suspect...))
	f.Add(bytes.Repeat([]byte{compoundType, 1, 0, 4}, 9))
	f.Add([]byte{compoundType, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		reader{}.claims(b, func(claim) { n++ })
		if n > len(b) {
			t.Errorf("%d claims in %d bytes", n, len(b))
		}
	})
}

func TestClaimsInPackets(t *testing.T) {
	suspect := []byte("\x03\x83\xabIncarnation\x05\xa4Node\xa3abc\xa4From\xa1x")
	packet := append([]byte{checksumType, 0, 0, 0, 0, compoundType, 2, 0, byte(len(suspect)), 0, byte(len(suspect))}, suspect...)
	packet = append(packet, suspect...)
	labelled, err := memberlist.AddLabelHeaderToPacket(packet, "job")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range [][]byte{packet, labelled} {
		var got []claim
		reader{}.claims(b, func(c claim) { got = append(got, c) })
		want := claim{suspectType, 5, "abc", "x"}
		if !slices.Equal(got, []claim{want, want}) {
			t.Errorf("%+v, want %+v twice", got, want)
		}
	}
}

// workers draws workers on hosts, in any order, with agents and the gone among
// them.
func workers(t *rapid.T) []Member {
	n := rapid.IntRange(0, 24).Draw(t, "n")
	var ms []Member
	for i := range n {
		ms = append(ms, Member{
			Identity: Identity{Kind: Worker, Worker: plan.WorkerID(i), Host: fmt.Sprint(rapid.IntRange(0, 5).Draw(t, "host"))},
			State:    rapid.SampledFrom([]State{StateAlive, StateAlive, StateAlive, StateSuspect, StateDead, StateLeft}).Draw(t, "state"),
		})
	}
	ms = append(ms, Member{Identity: Identity{Kind: Agent, Host: "0"}})
	return rapid.Permutation(ms).Draw(t, "order")
}

func TestNeighbours(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := workers(t)
		k := rapid.IntRange(-1, 30).Draw(t, "k")
		got := Neighbours(members, k)
		host := make(map[plan.WorkerID]string)
		perHost := make(map[string]int)
		for _, m := range members {
			if m.Kind == Worker && !m.State.Gone() {
				host[m.Worker] = m.Host
				perHost[m.Host]++
			}
		}
		if len(got) != len(host) {
			t.Fatalf("%d workers have neighbours, want %d", len(got), len(host))
		}
		for w, ns := range got {
			if want := max(0, min(k, len(host)-1)); len(ns) != want {
				t.Fatalf("worker %d has %d neighbours, want %d", w, len(ns), want)
			}
			seen := map[plan.WorkerID]bool{w: true}
			hosts := make(map[string]int)
			for _, n := range ns {
				if _, there := host[n]; !there || seen[n] {
					t.Fatalf("worker %d: neighbours %v: %d is gone, itself or there twice", w, ns, n)
				}
				seen[n] = true
				hosts[host[n]]++
			}
			others := len(host) - perHost[host[w]]
			if hosts[host[w]] > max(0, len(ns)-others) {
				t.Fatalf("worker %d: neighbours %v are on its own host although others have room", w, ns)
			}
			for a, na := range hosts { // one of each host before a second one of another
				for b, size := range perHost {
					if a != host[w] && b != host[w] && na > hosts[b]+1 && hosts[b] < size {
						t.Fatalf("worker %d: %d neighbours on host %s, %d on %s of %d", w, na, a, hosts[b], b, size)
					}
				}
			}
		}
		slices.Reverse(members)
		if again := Neighbours(members, k); fmt.Sprint(again) != fmt.Sprint(got) {
			t.Fatalf("in another order %v, want %v", again, got)
		}
	})
}

// On equal hosts the load is even, and a loss is spread.
func TestNeighboursAreEven(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		hosts, size := rapid.IntRange(1, 6).Draw(t, "hosts"), rapid.IntRange(1, 8).Draw(t, "size")
		var ms []Member
		for h := range hosts {
			for i := range size {
				ms = append(ms, Member{Identity: Identity{Kind: Worker, Worker: plan.WorkerID(i*hosts + h), Host: fmt.Sprint(h)}})
			}
		}
		most := (hosts - 1) * size
		if hosts == 1 {
			most = size - 1
		}
		k := rapid.IntRange(0, most).Draw(t, "k")
		load := make(map[plan.WorkerID]int)
		for _, ns := range Neighbours(ms, k) {
			for _, n := range ns {
				load[n]++
			}
		}
		for _, m := range ms {
			if load[m.Worker] != k {
				t.Fatalf("worker %d is a neighbour of %d, want %d: %v", m.Worker, load[m.Worker], k, Neighbours(ms, k))
			}
		}
	})
}

func TestNeighboursByHand(t *testing.T) {
	var ms []Member
	for id, host := range []string{"a", "a", "a", "b", "c"} {
		ms = append(ms, Member{Identity: Identity{Kind: Worker, Worker: plan.WorkerID(id), Incarnation: 1, Host: host}})
	}
	dead := ms[3]
	dead.Incarnation, dead.State = 0, StateDead // an earlier life
	got := fmt.Sprint(Neighbours(append(ms, dead), 2))
	if want := "map[0:[3 4] 1:[4 3] 2:[3 4] 3:[4 0] 4:[0 3]]"; got != want {
		t.Errorf("neighbours are %s, want %s", got, want)
	}
}
