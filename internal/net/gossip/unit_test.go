package gossip

import (
	"bytes"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/soliton-train/soliton/internal/id"
	"pgregory.net/rapid"
)

func TestValidate(t *testing.T) {
	good := Config{Self: worker(0, 0), Detect: time.Second, Members: 64}
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   []string // beginnings of the lines
	}{
		{"good", func(*Config) {}, nil},
		{"least", func(c *Config) { c.Detect, c.Members = 90*time.Millisecond, 10 }, nil},
		{"elsewhere with a key", func(c *Config) { c.Listen, c.SecretKey = "192.0.2.1:0", make([]byte, 16) }, nil},
		{"elsewhere", func(c *Config) { c.Listen = "192.0.2.1:0" }, []string{"gossip.Config.Listen is"}},
		{"everywhere", func(c *Config) { c.Listen, c.SecretKey = ":0", make([]byte, 16) }, []string{"gossip.Config.Listen is"}},
		{"everywhere by number", func(c *Config) { c.Listen, c.SecretKey = "0.0.0.0:0", make([]byte, 16) }, []string{"gossip.Config.Listen is"}},
		{"too soon", func(c *Config) { c.Detect, c.Members = 149*time.Millisecond, 1000 },
			[]string{"gossip.Config.Detect is 149ms; with Members 1000 it must be at least 150ms"}},
		{"all", func(c *Config) {
			*c = Config{
				Self: Identity{Worker: -1, Incarnation: -1, Host: "a b", Addr: "\n"}, Job: strings.Repeat("j", 256),
				Listen: "x", SecretKey: []byte("short"), Detect: -1, Members: 1,
			}
		}, []string{
			"gossip.Config.Self.Kind", "gossip.Config.Self.Worker", "gossip.Config.Self.Incarnation", "gossip.Config.Self.Host", "gossip.Config.Self.Addr",
			"gossip.Config.Job", "gossip.Config.SecretKey has 5 bytes; it must have 16, 24 or 32", "gossip.Config.Listen",
			"gossip.Config.Members",
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
	if got := good.times().Interval; got < 87*time.Millisecond || got > 88*time.Millisecond {
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
		}
		if i.Kind == Worker {
			i.Worker = id.WorkerID(rapid.IntRange(0, math.MaxInt).Draw(t, "worker"))
		}
		return i
	})
}

func TestIdentityRoundTrip(t *testing.T) {
	most := Identity{
		Kind: Worker, Worker: math.MaxInt, Incarnation: math.MaxInt, Host: strings.Repeat("h", MaxHost), Addr: strings.Repeat("a", MaxAddr),
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
	f.Add([]byte{0x96, 2, 0xdd, 0xff, 0xff, 0xff, 0xff})
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

// A length beyond the packet costs the same memory in every packet: the library's pooled decoders kept more each time.
func TestHostilePacketsTakeLittleMemory(t *testing.T) {
	hostile := []byte("\x03\x83\xa4Node\xdb\xeb\xac\xeb\xacabc")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	const packets = 64
	for range packets {
		reader{}.claims(hostile, func(claim) { t.Error("a claim") })
	}
	runtime.ReadMemStats(&after)
	if took := (after.TotalAlloc - before.TotalAlloc) / packets; took > 4<<20 {
		t.Errorf("a packet of %d bytes took %d bytes", len(hostile), took)
	}
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
