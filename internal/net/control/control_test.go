package control

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/reach"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func ptr[T any](v T) *T { return &v }

var samples = []Message{
	Hello{Protocol: 1, WorkerID: 3, Incarnation: 2, PID: 77},
	Welcome{Key: auth.Key("a key of the test")},
	Beat{},
	Note{Text: "reading data"},
	Unread{Sample: 1 << 40, Skips: 2, Index: 7, Step: 3, Text: "bad sector"}, BadSample{Sample: 1 << 40, Skips: 2, Do: SkipSample},
	Ready{
		Job: rundir.Job{Program: "gpt", Args: []string{"--layers", "2"}, Model: "gpt", ModelConfig: json.RawMessage(`{"layers":2}`),
			Seed: 1 << 63, ClipNorm: 0.1, Parameters: 1 << 40},
		Data:   []rundir.DataFile{{Path: "a.txt", Size: 5, SHA256: "00"}},
		Addr:   "127.0.0.1:4711",
		Layers: []Layer{{Name: "embed", Tensors: []int{1 << 20, 512}}, {Name: "gelu"}},
	},
	Start{RunDir: "/runs/x", Threads: 2, Reduction: "exact", Zero: 1, Joins: true},
	Step{Step: 1, Loss: 0.1, LR: 1e-3, GradNorm: 2, Tokens: 4096, MS: 1.5, Plan: 1, ValLoss: ptr(2.5), Metrics: map[string]float64{"accuracy": 0.5}, TrainMetrics: map[string]float64{"accuracy": 0.25}, Forwards: 8, Backwards: 7},
	Repaired{Step: 3, Try: 1, Layer: "embed", Block: 7, Target: "moment"},
	Output{Text: "func main() {\n"},
	Stop{Reason: "interrupt"},
	Done{Steps: 60, Loss: 3.1, ParamsSHA256: "ab", StoppedBy: "interrupt",
		Worker: rundir.Worker{Stages: []int{0}, Layers: []int{0, 1}, Forwards: 480, ParamBytes: 1 << 33}},
	Failed{Kind: UserPanic, Text: "index out of range", Stack: "goroutine 1", Step: 3},
	Host{Protocol: 1, Host: 2, Server: "a#b", Records: []rundir.Mark{{Name: "metrics.jsonl", Size: 7, Sum: 9}}},
	Copy{Name: "metrics.jsonl", At: 7, Data: []byte("{}\n")},
	Shown{Data: []byte("{}")},
	Inject{Kind: "slow", Workers: []int{2, 7}, Factor: 0.5, Stamp: true},
	Refused{Text: "no"},
	Asked{ID: 7, Message: []byte{1}},
	Answered{ID: 7, Message: []byte{1}},
	Alive{Workers: []rundir.Process{{ID: 1, PID: 2, Host: "a"}}},
	Lead{Term: 3, Plan: 2, Step: 7},
	Told{},
	Reach{Protocol: 1, Host: "a"},
	Reached{Found: reach.Silent},
	Enter{1, Member{"a", "a:1", "a:2", nil, 4}},
	Entered{2, 1, []Member{{"a", "a:1", "a:2", []int{0, 1}, 0}}},
	Relayed{Worker: 3, Incarnation: 1, Message: []byte{0x92, 0xa4}},
	Closed{Worker: 3, Incarnation: 1},
	Exited{Worker: 3, Code: -1, Text: "signal: killed", Panicked: true, Last: "panic: x"},
	Kill{Worker: 3, Incarnation: 1},
	Fence{Worker: 3, Incarnation: 1, Next: 2},
	Watch{Every: 4},
	Clock{Share: 0.5},
	OpenClocks{ID: 1, Workers: []int{2, 3}},
	Clocks{ID: 1, Devices: []ClockDevice{{"card", "gpu", []int{700, 1400}, 1400, []int{2, 3}, -1, []float64{0.5, 1}, 0.4, []float64{1, 1.5}}}},
	SetClock{ID: 1, Device: 2, MHz: 700},
	ClockState{ID: 1, Devices: []ClockNow{{700, 5.5}}, Err: "no permission"},
	Timeline{Step: 8, Began: 1 << 50, Commit: 90, End: 100, Passes: []Pass{{Layer: 2, Micro: 1, From: 5, To: 10, Wait: 1}, {Backward: true, Layer: 2, Micro: 1, From: 20, To: 40}}, Cut: true},
}

func frameOf(t testing.TB, m Message) []byte {
	t.Helper()
	body, err := Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

// pipe returns both ends of a connection that ends with the test.
func pipe(t testing.TB) (a, b *Conn) {
	x, y := net.Pipe()
	t.Cleanup(func() { x.Close(); y.Close() })
	return New(x), New(y)
}

func TestEveryMessageArrivesAsSent(t *testing.T) {
	a, b := pipe(t)
	go func() {
		for _, m := range samples {
			a.Send(m)
		}
		a.Close()
	}()
	for _, want := range samples {
		got, err := b.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %#v, want %#v", got, want)
		}
	}
	if _, err := b.Receive(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("after close: %v, want EOF", err)
	}
}

// Every field of what recoveries exchange arrives, the default values too, alone and shared.
func TestPlanMessagesArriveAsSent(t *testing.T) {
	var a Answer
	var o Order
	var f Fill
	for _, v := range []any{&a, &o, &f} {
		sample(reflect.ValueOf(v).Elem())
	}
	shared, err := o.Share()
	if err != nil {
		t.Fatal(err)
	}
	sharedFill, err := f.Share()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []struct{ sent, want Message }{{a, a}, {o, o}, {f, f}, {shared, o}, {sharedFill, f}, {Answer{}, Answer{}}, {Order{}, Order{}}, {Fill{}, Fill{}}} {
		if got, err := Unmarshal(frameOf(t, m.sent)[4:]); err != nil || !reflect.DeepEqual(got, m.want) {
			t.Errorf("%#v arrived as %#v, %v", m.want, got, err)
		}
	}
	for _, o := range []Order{o, {}} {
		b, err := o.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ParseOrder(b); err != nil || !reflect.DeepEqual(got, o) {
			t.Errorf("order %+v came out of the log as %+v, %v", o, got, err)
		}
	}
}

// A list of numbers that is none of its elements is an error.
func TestListsRefuse(t *testing.T) {
	for name, numbers := range map[string][]int{
		"within an element": {0, 0, 4, 1}, "too many workers": {0, 0, 4, 1, 2, 3}, "less than none": {0, 0, 4, 1, -1}, "within the second": {0, 0, 4, 1, 0, 0},
	} {
		b, err := marshal(map[string]any{"plan": map[string]any{"shards": numbers}})
		if err != nil {
			t.Fatal(err)
		}
		if o, err := ParseOrder(b); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: taken as %+v, %v", name, o.Plan.Shards, err)
		}
	}
	b, err := marshal(map[string]any{"works": []int{0, 0, 256, 0, 0}})
	if err != nil {
		t.Fatal(err)
	}
	if r := new(Report); unmarshal(b, r) == nil {
		t.Errorf("phase 256 is taken as %v", r.Works)
	}
}

// What comes from outside is an error, not a panic or much memory.
func TestParseOrderRefuses(t *testing.T) {
	for name, b := range map[string]string{
		"nothing":       "",
		"text":          `{"plan":{}}`,
		"deep":          strings.Repeat("\x91", 100),
		"long array":    "\x81\xa5peers\xdd\xff\xff\xff\xff",
		"cut short":     "\x81\xa4plan",
		"another type":  "\x81\xa5epoch\xa1x",
		"more than one": "\x80\x80",
	} {
		if o, err := ParseOrder([]byte(b)); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: taken as %+v, %v", name, o, err)
		}
	}
}

// A message of every type can be received.
func TestEveryTypeIsRegistered(t *testing.T) {
	for kind := range kinds {
		m, err := Unmarshal(slices.Concat([]byte{0x92, 0xa0 | byte(len(kind))}, []byte(kind), []byte{0x80}))
		if err != nil || m.kind() != kind {
			t.Errorf("%s: %#v, %v", kind, m, err)
		}
	}
}

func TestTimeArrives(t *testing.T) {
	now := time.Now()
	m, err := Unmarshal(frameOf(t, Step{Time: now})[4:])
	if err != nil || !m.(Step).Time.Equal(now) {
		t.Errorf("got %v, %v", m, err)
	}
}

// A Receive that its context has ended, even in the middle of a frame, can be
// repeated and loses nothing.
func TestReceiveGoesOnAfterItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := net.Pipe()
		defer x.Close()
		b := New(y)
		defer b.Close()
		frame := frameOf(t, Note{Text: "hello"})
		go x.Write(frame[:7])
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if m, err := b.Receive(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v, %v", m, err)
		}
		go x.Write(frame[7:])
		if m, err := b.Receive(t.Context()); err != nil || m != (Note{Text: "hello"}) {
			t.Errorf("got %v, %v", m, err)
		}
	})
}

func TestCloseEndsWaits(t *testing.T) {
	a, _ := pipe(t)
	errs := make(chan error)
	go func() { _, err := a.Receive(context.Background()); errs <- err }()
	go func() { errs <- a.Send(Note{}) }()
	a.Close()
	for range 2 {
		if err := <-errs; err == nil {
			t.Error("a wait ended without an error")
		}
	}
}

func TestSendsDoNotMix(t *testing.T) {
	a, b := pipe(t)
	const senders, each = 4, 20
	for i := range senders {
		go func() {
			for range each {
				a.Send(Note{Text: strings.Repeat(fmt.Sprint(i), 1000)})
			}
		}()
	}
	for range senders * each {
		m, err := b.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		text := m.(Note).Text
		if len(text) != 1000 || strings.Trim(text, text[:1]) != "" {
			t.Fatalf("messages mixed: %.40q", text)
		}
	}
}

func TestBadFrames(t *testing.T) {
	body := func(v ...any) []byte {
		var b bytes.Buffer
		enc := msgpack.NewEncoder(&b)
		for _, v := range v {
			enc.Encode(v)
		}
		return b.Bytes()
	}
	frame := func(b []byte) []byte { return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...) }
	deep := append(bytes.Repeat([]byte{0x91}, 1<<20), 0xc0)
	for _, c := range []struct {
		name  string
		bytes []byte
		want  error
	}{
		{"too long", []byte{0xff, 0xff, 0xff, 0xff}, ErrFrameSize},
		{"empty", frame(nil), ErrFormat},
		{"unknown kind", frame(body([]any{"nonsense", map[string]any{}})), ErrFormat},
		{"three parts", frame(body([]any{"note", map[string]any{}, 1})), ErrFormat},
		{"bytes after", frame(body([]any{"note", map[string]any{}}, 1)), ErrFormat},
		{"wrong type", frame(body([]any{"step", map[string]any{"Loss": "high"}})), ErrFormat},
		{"deep nesting in an unknown field", frame(append([]byte("\x92\xa4note\x81\xa1x"), deep...)), ErrFormat},
		{"large count", frame([]byte("\x92\xa5ready\x81\xa4Data\xdd\x7f\xff\xff\xff")), ErrFormat},
		{"many elements", frame(append([]byte("\x92\xa5ready\x81\xa4Data\xdd\x00\x40\x00\x00"), make([]byte, 1<<22)...)), ErrFormat},
		{"cut in the body", frame(body([]any{"note", map[string]any{}}))[:6], io.EOF},
	} {
		x, y := net.Pipe()
		go func() { x.Write(c.bytes); x.Close() }()
		conn := New(y)
		if m, err := conn.Receive(t.Context()); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, %v, want %v", c.name, m, err, c.want)
		}
		conn.Close()
	}
}

func TestUnknownFieldIsSkipped(t *testing.T) {
	b, _ := msgpack.Marshal([]any{"note", map[string]any{"Text": "a", "New": []any{map[string]any{"x": 1.5}}}})
	if m, err := Unmarshal(b); err != nil || m != (Note{Text: "a"}) {
		t.Errorf("got %v, %v", m, err)
	}
}

func TestSendRefusesLargeMessage(t *testing.T) {
	a, _ := pipe(t)
	if err := a.Send(Output{Text: strings.Repeat("x", MaxFrame)}); !errors.Is(err, ErrFrameSize) {
		t.Errorf("got %v", err)
	}
}

func TestIdentity(t *testing.T) {
	t.Setenv(EnvAgent, "") // so that the variable comes back as it was
	key := auth.NewKey()
	nc, theirs, err := Pair(key)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	fd, err := unix.Dup(int(theirs.Fd())) // as a process inherits it
	if err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	want := Identity{Conn: fd, WorkerID: 2, Incarnation: 5, Progress: 3, Canaries: [2]int{4, 5}, Links: "/tmp/links", Addr: "127.1.0.3"}
	for _, kv := range want.Environ() {
		k, v, _ := strings.Cut(kv, "=")
		t.Setenv(k, v)
	}
	id, ok, err := Launched()
	if id != want || !ok || err != nil {
		t.Fatalf("got %v, %v, %v", id, ok, err)
	}

	conn, got, err := id.Connect(t.Context())
	if err != nil || !bytes.Equal(got, key) {
		t.Fatal(err)
	}
	defer conn.Close()
	if m, err := New(nc).Receive(t.Context()); m != id.Hello() {
		t.Errorf("got %v, %v", m, err)
	}

	for text, what := range map[string]string{
		"/tmp/socket":            "invalid character",
		`{"Conn":2}`:             "Conn is 2",
		`{"Conn":"x"}`:           "Conn",
		`{"WorkerID":-1}`:        "WorkerID is -1",
		`{"Incarnation":-1}`:     "Incarnation -1",
		`{"Links":"links"}`:      `Links is "links"`,
		`{"Conn":3,"Addr":"no"}`: `"no"`,
	} {
		t.Setenv(EnvAgent, text)
		_, ok, err = Launched()
		if !ok || err == nil || !strings.Contains(err.Error(), what) || !strings.Contains(err.Error(), EnvAgent) {
			t.Errorf("%s: %v, %v", text, ok, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, m := range samples {
		f.Add(frameOf(f, m)[4:])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		m, err := Unmarshal(body)
		if err != nil {
			if !errors.Is(err, ErrFormat) || m != nil {
				t.Fatalf("got %v, %v", m, err)
			}
			return
		}
		// What was understood is understood again after a round trip.
		frame, err := Marshal(m)
		if err != nil {
			t.Fatalf("encode %#v: %v", m, err)
		}
		again, err := Unmarshal(frame)
		if err != nil {
			t.Fatalf("decode again: %v", err)
		}
		second, err := Marshal(again)
		if err != nil || !bytes.Equal(second, frame) {
			t.Fatalf("round trip changed %#v to %#v (%v)", m, again, err)
		}
	})
}

// Orders are also read from the log of what hosts agree on.
func FuzzParseOrder(f *testing.F) {
	for _, m := range samples {
		if o, ok := m.(Order); ok {
			text, err := o.Encode()
			if err != nil {
				f.Fatal(err)
			}
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		o, err := ParseOrder(text)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		again, err := o.Encode()
		if err != nil {
			t.Fatalf("encode %+v: %v", o, err)
		}
		if _, err := ParseOrder(again); err != nil {
			t.Fatalf("%+v: %v", o, err)
		}
	})
}
