package torch

import (
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/compute/tensor"
	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/internal/worker/engine"
	"github.com/soliton-train/soliton/rng"
	"github.com/soliton-train/soliton/trainer"
)

func TestMain(m *testing.M) {
	// The thread that starts processes stays.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/soliton-train/soliton/internal/platform.keepThread"))
}

// Standard flags go to the worker, everything else to the program.
func TestSplit(t *testing.T) {
	for _, from := range [][]string{{"--init-from=a.pt"}, {"--init-from", "a.pt"}} {
		standard, own, given := split(append(from, "--steps", "5", "--width=3", "--seed=7", "-x", "--lr", "0.1", "--flag", "--", "--steps", "9"))
		if !slices.Equal(standard, []string{"--steps", "5", "--seed=7", "--lr", "0.1"}) || !slices.Equal(own, []string{"--width=3", "-x", "--flag", "--", "--steps", "9"}) {
			t.Errorf("standard %q, own %q", standard, own)
		}
		if given.Seed != 7 || given.Rates != 5 || given.InitFrom != "a.pt" {
			t.Errorf("%q: the program is given %+v", from, given)
		}
	}
	if _, _, given := split([]string{"--lr-steps", "8", "--steps=5"}); given.Rates != 8 {
		t.Errorf("--lr-steps 8 --steps=5: %d rates", given.Rates)
	}
	if _, own, _ := split([]string{"--micro-batch"}); len(own) != 0 {
		t.Errorf("a flag without its value went to the program: %q", own)
	}
}

// The Python package is written once.
func TestUnpackPackage(t *testing.T) {
	parent := t.TempDir()
	folder, err := unpackBelow(parent)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(folder, "soliton", "_child.py")); err != nil {
		t.Error(err)
	}
	if again, err := unpackBelow(parent); err != nil || again != folder {
		t.Errorf("the second time: %s, %v; want %s", again, err, folder)
	}
	if entries, _ := os.ReadDir(parent); len(entries) != 1 {
		t.Errorf("%d entries are left, want 1", len(entries))
	}
}

// The Python package has tests of its own.
func TestPythonPackage(t *testing.T) {
	const python = "/usr/bin/python3" // which Debian's python3-torch serves
	out, err := exec.Command(python, "-c", "import torch").CombinedOutput()
	require.Tool(t, "torch", err == nil, python+" cannot import torch (Debian: python3-torch): "+string(out))
	cmd := exec.Command(python, "-W", "ignore", "testdata/package_test.py")
	cmd.Env = append(os.Environ(), "PYTHONPATH=python", "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// A description that memory could not hold, or that describes no job, is refused.
func TestParse(t *testing.T) {
	const good = `{"layers":[{"name":"a","out":[2],"params":[{"name":"w","shape":[2,3]}]}],"samples":1}`
	if d, err := parse([]byte(good)); err != nil || d.Layers[0].size() != 6 {
		t.Errorf("%+v, %v", d, err)
	}
	for name, text := range map[string]string{
		"no JSON":         `{`,
		"no layers":       `{"samples":1}`,
		"no samples":      `{"layers":[{"out":[2]}]}`,
		"huge parameter":  strings.Replace(good, "[2,3]", "[4294967296,4294967296]", 1),
		"huge output":     strings.Replace(good, "[2],", "[4294967296],", 1),
		"carries much":    strings.Replace(good, `"out":[2]`, `"out":[2],"carries":4294967296`, 1),
		"carries less":    strings.Replace(good, `"out":[2]`, `"out":[2],"carries":-1`, 1),
		"no elements":     strings.Replace(good, "[2,3]", "[2,0]", 1),
		"negative shape":  strings.Replace(good, "[2,3]", "[-2,-3]", 1),
		"negative number": strings.Replace(good, `"samples":1`, `"samples":1,"eval_samples_there":-1`, 1),
	} {
		if _, err := parse([]byte(text)); err == nil {
			t.Errorf("%s: was taken", name)
		}
	}
}

// Memory that was given back is taken again, and blocks do not overlap.
func TestMemory(t *testing.T) {
	m, err := newMemory(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	a, b := m.take(100), m.take(3)
	for i := range a.f {
		a.f[i] = 1
	}
	if b.f[0] != 0 || a.at == 0 {
		t.Errorf("block b has %v, and block a is at %d", b.f, a.at)
	}
	if at, ok := m.where(a.f[10:]); !ok || at != a.at+40 {
		t.Errorf("a.f[10:] is at %d, %v", at, ok)
	}
	if _, ok := m.where(make([]float32, 4)); ok {
		t.Error("memory of Go was found in the shared memory")
	}
	m.give(a)
	if c := m.take(120); c.at != a.at {
		t.Errorf("block of 120 at %d, want %d again", c.at, a.at)
	}
	d := m.lend(1000)
	m.reclaim()
	m.reclaim()
	if e, f := m.take(1000), m.take(1000); e.at != d.at || f.at == d.at {
		t.Errorf("blocks of 1000 at %d and %d, want one at %d again", e.at, f.at, d.at)
	}
}

// What processes print is in the log after a flush, up to a bound, which the log names once. What follows disturbs nobody.
func TestOutput(t *testing.T) {
	var log strings.Builder
	o, err := newOutput(&log)
	if err != nil {
		t.Fatal(err)
	}
	said := func() string { // a flush takes the lock after the goroutine
		o.flush()
		o.mu.Lock()
		defer o.mu.Unlock()
		return log.String()
	}
	if _, err := o.theirs.WriteString("hello\n"); err != nil || said() != "hello\n" {
		t.Errorf("%v, %q", err, log.String())
	}
	megabyte := make([]byte, 1<<20)
	for range 2 * maxPrinted / len(megabyte) {
		if _, err := o.theirs.Write(megabyte); err != nil {
			t.Fatal(err)
		}
	}
	text := said()
	if len(text) > maxPrinted+200 || strings.Count(text, "soliton: the Python processes of this worker have printed 16 MiB") != 1 {
		t.Errorf("the log has %d bytes: ...%q", len(text), text[len(text)-200:])
	}
	o.close()
	if log.Len() != len(text) {
		t.Errorf("%d bytes more", log.Len()-len(text))
	}
}

// A reply is bounded, whatever a process sends, and one that has exited is told apart from one that is wrong.
func TestHostileReplies(t *testing.T) {
	frame := func(size uint32, kind byte, payload string) []byte {
		return append(append(binary.LittleEndian.AppendUint32(nil, size), kind), payload...)
	}
	for _, c := range []struct {
		name string
		sent []byte
		lost bool
		text string
	}{
		{"nothing", nil, true, ""},
		{"half a header", []byte{1, 0}, true, ""},
		{"half a payload", frame(9, saidDone, "half"), true, ""},
		{"too large", frame(math.MaxUint32, saidDone, ""), false, "a reply of 4294967295 bytes"},
		{"too small", frame(3, saidDone, "abc"), false, "a reply of 3 bytes, too few"},
		{"unknown kind", frame(0, 9, ""), false, "of unknown kind 9"},
		{"no JSON", frame(4, saidFailed, "oops"), false, "an error that cannot be read"},
		{"exception", frame(15, saidFailed, `{"text":"boom"}`), false, "boom"},
	} {
		ours, theirs := connect(t)
		if _, err := theirs.Write(c.sent); err != nil {
			t.Fatal(err)
		}
		theirs.Close()
		_, _, err := ours.done()
		if errors.As(err, new(*lostError)) != c.lost || !c.lost && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", c.name, err)
		}
		ours.Close()
	}
}

// elsewhere is another machine, which has one file.
type elsewhere struct{ asked int }

func (*elsewhere) Found([]string) error { return nil }

func (e *elsewhere) Get(pattern string, none *find.Error) ([]find.File, error) {
	if e.asked++; pattern != "far.txt" {
		return nil, none
	}
	return []find.File{{Path: pattern, Copy: "/cache/far.txt"}}, nil
}

// Before the description, a program may look for files, of this machine and others. A process that is started again hears the same.
func TestLooks(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("near.txt", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	far := new(elsewhere)
	defer find.Ask(far)()
	p := new(Program)
	for range 2 {
		ours, theirs := connect(t)
		p.first = ours
		for _, asked := range []string{`["near.txt","far.txt"]`, `["gone.txt"]`} {
			if _, err := theirs.Write(append(append(binary.LittleEndian.AppendUint32(nil, uint32(len(asked))), saidLooks), asked...)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := theirs.Write(append(binary.LittleEndian.AppendUint32(nil, 2), saidDone, '{', '}')); err != nil {
			t.Fatal(err)
		}
		if told, err := p.described(); err != nil || string(told) != "{}" {
			t.Errorf("described as %q, %v", told, err)
		}
		ours.Close()
		answers, err := io.ReadAll(theirs)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`{"files":[["far.txt","/cache/far.txt"],["near.txt","near.txt"]],"error":""}`, `"error":"gone.txt: no such file or directory"`} {
			if !strings.Contains(string(answers), want) {
				t.Errorf("answers %q, want %s", answers, want)
			}
		}
		theirs.Close()
	}
	if far.asked != 2 {
		t.Errorf("the other machine was asked %d times, want 2", far.asked)
	}
	for _, asked := range []string{`{`, `[1]`} {
		if _, err := look([]byte(asked)); err == nil || !strings.Contains(err.Error(), "a request that cannot be read") {
			t.Errorf("%s: %v", asked, err)
		}
	}
}

// connect returns the ends of a connection.
func connect(t *testing.T) (ours *connection, theirs net.Conn) {
	t.Helper()
	conn, file, err := platform.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	if theirs, err = net.FileConn(file); err != nil {
		t.Fatal(err)
	}
	file.Close()
	return newConnection(conn, 0), theirs
}

// fake plays the Python processes: layers add their first parameter, and the gradient of it is the sum of that of the output.
type fake struct {
	t     *testing.T
	p     *Program
	exits map[byte]int // requests of a kind at which a computing process exits
	forks atomic.Int64
	fails string // the text of an exception

	reading sync.WaitGroup // processes that read samples
	had     sync.Map       // samples that were asked for
}

func (f *fake) request(c net.Conn) (kind byte, n []uint64, ok bool) {
	header := make([]byte, headerSize)
	if _, err := c.Read(header); err != nil {
		return 0, nil, false
	}
	payload := make([]byte, binary.LittleEndian.Uint32(header))
	if len(payload) > 0 {
		if _, err := c.Read(payload); err != nil {
			return 0, nil, false
		}
	}
	for ; len(payload) > 0; payload = payload[8:] {
		n = append(n, binary.LittleEndian.Uint64(payload))
	}
	return header[4], n, true
}

func (f *fake) reply(c net.Conn, kind byte, payload []byte) {
	_, _ = c.Write(append(append(binary.LittleEndian.AppendUint32(nil, uint32(len(payload))), kind), payload...)) // the other end may be gone
}

// first serves the first process.
func (f *fake) first(c *net.UnixConn) {
	header, oob := make([]byte, headerSize), make([]byte, 64)
	for {
		n, oobn, _, _, err := c.ReadMsgUnix(header, oob)
		if err != nil || n == 0 {
			return
		}
		if _, err := io.ReadFull(c, make([]byte, binary.LittleEndian.Uint32(header))); err != nil {
			f.t.Error(err)
			return
		}
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			f.t.Error(err)
			return
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil {
			f.t.Error(err)
			return
		}
		file := os.NewFile(uintptr(fds[0]), "computer")
		conn, err := net.FileConn(file)
		file.Close()
		if err != nil {
			f.t.Error(err)
			return
		}
		f.forks.Add(1)
		f.reply(c, saidDone, []byte(`{"pid":0,"ended":"SIGKILL"}`))
		if cap(f.p.readers) == 0 {
			f.compute(conn)
			continue
		}
		f.reading.Go(func() { f.read(conn) })
	}
}

// read serves a process that reads samples, of which each has its index as input and target. It exits at the first odd one that it is the first
// to read.
func (f *fake) read(c net.Conn) {
	defer c.Close()
	for {
		kind, n, ok := f.request(c)
		if !ok {
			return
		}
		if kind != askSample {
			f.t.Errorf("a process that reads is asked for %d", kind)
		}
		if _, before := f.had.LoadOrStore(n[1], true); !before && n[1]%2 == 1 {
			return
		}
		for _, at := range n[3:5] {
			f.p.memory.floats(int(at), 1)[0] = float32(n[1])
		}
		f.reply(c, saidDone, make([]byte, 8))
	}
}

// Samples are read by several processes at the same time, and again where one exits.
func TestReaders(t *testing.T) {
	f := newFakeOf(t, nil, "", 3)
	defer f.reading.Wait()
	defer f.p.endReaders()
	d := &data{p: f.p, size: 100}
	var tasks sync.WaitGroup
	for i := range 8 {
		tasks.Go(func() {
			x, y := trainer.NewTensor(trainer.Float32, 1), trainer.NewTensor(trainer.Float32, 1)
			if err := d.Sample(trainer.Sample{Index: i, Rand: rng.New(1, rng.Place{})}, x, y); err != nil || x.F[0] != float32(i) || y.F[0] != float32(i) {
				t.Errorf("sample %d: %v, %v, %v", i, x.F, y.F, err)
			}
		})
	}
	tasks.Wait()
	if forks := f.forks.Load(); forks < 5 || forks > 3+4 {
		t.Errorf("%d processes for 3 places of which 4 exited", forks)
	}
}

// compute serves a computing process, until it exits.
func (f *fake) compute(c net.Conn) {
	defer c.Close()
	douts, kept := map[uint64][2]float32{}, map[[2]uint64]float32{}
	floats := func(at uint64) []float32 { return f.p.memory.floats(int(at), 2) }
	last := map[uint64][2]float32{}
	for {
		kind, n, ok := f.request(c)
		if !ok {
			return
		}
		if len(f.exits) > 0 {
			if f.exits[kind]--; f.exits[kind] == 0 {
				return
			}
		}
		said := make([]byte, 8)
		if f.fails != "" {
			f.reply(c, saidFailed, []byte(`{"text":"`+f.fails+`","trace":"where"}`))
			continue
		}
		switch kind {
		case askForward:
			x := last[n[0]]
			if n[2] == 1 {
				x = [2]float32(floats(n[5]))
			}
			w := floats(n[6])[0]
			x[0], x[1] = x[0]+w, x[1]+w
			last[n[0]] = x
			if n[8] != 0 {
				copy(floats(n[8]), x[:])
			}
		case askLoss:
			douts[n[0]] = [2]float32{1, 2}
			said = binary.LittleEndian.AppendUint64(said, math.Float64bits(float64(last[n[0]][0])))
			said = binary.LittleEndian.AppendUint64(said, 1)
		case askBackward:
			if _, ok := last[n[0]]; !ok {
				f.t.Error("backward of a pass that this process does not have")
			}
			if n[5] != 0 {
				douts[n[0]] = [2]float32(floats(n[5]))
			}
			d, ok := douts[n[0]]
			if !ok {
				f.t.Error("backward of a pass without a gradient")
			}
			if grad := d[0] + d[1]; n[8] != 0 {
				kept[[2]uint64{n[1], n[8] - 1}] = grad * last[n[0]][0]
				for merges := n[9:]; len(merges) > 0; merges = merges[2:] {
					into, from := [2]uint64{n[1], merges[0]}, [2]uint64{n[1], merges[1]}
					kept[into] += kept[from]
					delete(kept, from)
				}
			} else if n[6] != 0 {
				floats(n[6])[0] = grad
			}
			if n[7] != 0 {
				copy(floats(n[7]), d[:])
			}
		case askHandOver:
			x, ok := kept[[2]uint64{n[0], n[1]}]
			if !ok {
				f.t.Errorf("layer %d has nothing in slot %d", n[0], n[1])
			}
			floats(n[2])[0] = x
		case askForget:
			for at := range kept {
				if n[0] <= at[0] && at[0] < n[1] {
					delete(kept, at)
				}
			}
			continue
		case askDrop:
			delete(last, n[0])
			continue
		}
		f.reply(c, saidDone, said)
	}
}

// gathered collects gradients.
type gathered map[int][]float32

func (gathered) Buffer(int) []float32                    { return make([]float32, 1) }
func (gathered) Last() bool                              { return true }
func (gathered) Lane() int                               { return 0 }
func (gathered) Sum(layer int, _ tree.Node, _ []float32) { panic("a sum of gradients") }
func (g gathered) Done(layer int, grad []float32) {
	g[layer] = append(g[layer], grad...)
}

// shared are gradients in the shared memory, but for those of layer 0. They are altered once they are handed over.
type shared struct {
	gathered
	p     *Program
	after []*float32
}

func (s *shared) Buffer(layer int) []float32 {
	if layer == 0 {
		return s.gathered.Buffer(0)
	}
	return s.p.Memory(1)
}

func (s *shared) Done(layer int, grad []float32) {
	s.gathered.Done(layer, grad)
	grad[0] = -1
	s.after = append(s.after, &grad[0])
}

// newFake returns a program of two layers with one parameter each, and its processes.
func newFake(t *testing.T, exits map[byte]int, fails string) *fake {
	t.Helper()
	return newFakeOf(t, exits, fails, 0)
}

// newFakeOf is newFake for a program with processes that read samples.
func newFakeOf(t *testing.T, exits map[byte]int, fails string, readers int) *fake {
	t.Helper()
	m, err := newMemory(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	out, err := newOutput(io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	l := layer{Name: "a", Out: []int{}, Params: []param{{Shape: []int{1}}}}
	p := &Program{memory: m, output: out, passes: make(map[uint64]*pass), job: &description{Layers: []layer{l, l}}, params: make([]block, 2), grads: make([]block, 2)}
	p.openReaders(readers)
	ours, theirs := connect(t)
	p.first = ours
	f := &fake{t: t, p: p, exits: exits, fails: fails}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f.first(theirs.(*net.UnixConn))
	}()
	t.Cleanup(func() {
		p.endComputer()
		ours.Close()
		theirs.Close()
		<-ended
		out.close()
		m.close()
	})
	p.Hold(0, 1)[0], p.Hold(1, 1)[0] = 10, 20
	return f
}

// A Python program has a worker for each GPU, where it sees any.
func TestWorkersOfGPUs(t *testing.T) {
	for visible, want := range map[string]int{"": 0, "0": 1, "0,2": 2, " 1 , GPU-5a": 2, "1,-1,2": 1, "-1": 0, "0,,1": 1} {
		if n := named(visible); n != want {
			t.Errorf("CUDA_VISIBLE_DEVICES=%q names %d, want %d", visible, n, want)
		}
	}
	if n := Workers("examples/gpt"); n != 0 {
		t.Errorf("a Go program has %d workers", n)
	}
}

// Wherever the computing process exits, a pass gives the same, and each gradient is handed over once.
func TestStageComputesAgain(t *testing.T) {
	for name, exits := range map[string]map[byte]int{
		"never":                     nil,
		"first layer":               {askForward: 1},
		"second layer":              {askForward: 2},
		"loss":                      {askLoss: 1},
		"backward":                  {askBackward: 1},
		"backward of the one below": {askBackward: 2},
		"again while it recomputes": {askBackward: 1, askForward: 3},
	} {
		f := newFake(t, exits, "")
		s := f.p.Stage(0, 2, 1, nil)
		m := engine.Micro{Step: 1, Samples: 2, Train: true, Target: tensor.Of([]float32{0, 0}, 2)}
		pass, out, err := s.Forward(m, tensor.Of([]float32{1, 2}, 2))
		if err != nil || out.Len() != 2 || out.F != nil { // only the loss reads it
			t.Errorf("%s: forward %v, %v", name, out.F, err)
		}
		sum, count, dout := s.Loss(pass, tensor.Of([]float32{0, 0}, 2))
		if sum != 31 || count != 1 {
			t.Errorf("%s: loss %v, %d", name, sum, count)
		}
		g := &shared{gathered: gathered{}, p: f.p}
		s.Backward(pass, dout, g)
		for _, x := range g.after {
			if *x != -1 {
				t.Errorf("%s: a gradient that was handed over is written again", name)
			}
		}
		if s.(*stage).kept.sums != nil {
			t.Errorf("%s: a gradient on the processor is kept", name)
		}
		if !slices.Equal(g.gathered[0], []float32{3}) || !slices.Equal(g.gathered[1], []float32{3}) {
			t.Errorf("%s: gradients %v", name, g.gathered)
		}
		if want := 1 + min(1, len(exits)); int(f.forks.Load()) < want {
			t.Errorf("%s: %d processes, want %d", name, f.forks.Load(), want)
		}
		if len(f.p.passes) != 0 {
			t.Errorf("%s: %d passes are left", name, len(f.p.passes))
		}
	}
}

// summed are sums of gradients that a process has kept.
type summed struct {
	last bool
	sums map[int]map[tree.Node]float32
}

func (*summed) Buffer(int) []float32 { return make([]float32, 1) }
func (s *summed) Last() bool         { return s.last }
func (s *summed) Lane() int          { return 0 }
func (*summed) Done(int, []float32)  { panic("a gradient by itself") }

func (s *summed) Sum(layer int, of tree.Node, grad []float32) {
	if _, ok := s.sums[layer][of]; ok {
		panic("a sum comes twice")
	}
	if s.sums[layer] == nil {
		s.sums[layer] = map[tree.Node]float32{}
	}
	s.sums[layer][of] = grad[0]
}

// Wherever the computing process exits, the sums that it keeps are the same, and are handed over once, with the last pass or after it.
func TestStageKeepsGradients(t *testing.T) {
	for name, exits := range map[string]map[byte]int{
		"never":                     nil,
		"third pass, forward":       {askForward: 5},
		"third pass, backward":      {askBackward: 6},
		"hand over":                 {askHandOver: 1},
		"hand over, second layer":   {askHandOver: 3},
		"again while it recomputes": {askHandOver: 2, askForward: 13},
	} {
		for _, after := range []bool{false, true} {
			f := newFake(t, maps.Clone(exits), "")
			f.p.job.Identity.Device = "a GPU"
			s := f.p.Stage(0, 2, 1, nil).(*stage)
			g := &summed{sums: map[int]map[tree.Node]float32{}}
			for _, index := range []int{0, 2, 3, 1, 6} {
				m := engine.Micro{Step: 1, Index: index, Of: 8, Samples: 2, Train: true, Target: tensor.Of([]float32{0, 0}, 2)}
				pass, _, err := s.Forward(m, tensor.Of([]float32{float32(index), 2}, 2))
				if err != nil {
					t.Fatal(err)
				}
				_, _, dout := s.Loss(pass, tensor.Of([]float32{0, 0}, 2))
				g.last = index == 6 && !after
				s.Backward(pass, dout, g)
			}
			if after {
				s.HandOver(g)
			}
			// A layer's output is the first sample and 30, and the gradient is 3 times as much.
			want := map[tree.Node]float32{{Lo: 0, Hi: 4}: 3 * (4*30 + 6), {Lo: 6, Hi: 7}: 3 * (30 + 6)}
			if !maps.Equal(g.sums[0], want) || !maps.Equal(g.sums[1], want) {
				t.Errorf("%s: sums %v, want %v", name, g.sums, want)
			}
			if len(f.p.passes) != 0 || s.kept.sums != nil {
				t.Errorf("%s: %d passes are left", name, len(f.p.passes))
			}
		}
	}
}

// A process that exits again and again in one call ends the run, and so does an exception, with its trace.
func TestStageFails(t *testing.T) {
	caught := func(f *fake) (p *kernel.Panic) {
		defer func() { p, _ = recover().(*kernel.Panic) }()
		_, _, _ = f.p.Stage(0, 2, 1, nil).Forward(engine.Micro{Step: 1, Samples: 2, Train: true}, tensor.Of([]float32{1, 2}, 2))
		return nil
	}
	f := newFake(t, nil, "boom")
	if p := caught(f); p == nil || p.Value != "boom" || string(p.Stack) != "where" {
		t.Errorf("an exception: %+v", p)
	}
	f = newFake(t, nil, "")
	f.p.first = nil
	f.p.command.python = "/no/python"
	if p := caught(f); p == nil || !strings.Contains(p.Value.(string), "--python /no/python cannot be started") {
		t.Errorf("no process: %+v", p)
	}
}

// A pass that a step before has left is dropped, with its memory.
func TestStageSweeps(t *testing.T) {
	f := newFake(t, nil, "")
	s := f.p.Stage(0, 2, 1, nil)
	for step := 1; step <= 50; step++ {
		if _, _, err := s.Forward(engine.Micro{Step: step, Samples: 2, Train: true}, tensor.Of([]float32{1, 2}, 2)); err != nil {
			t.Fatal(err)
		}
	}
	if f.p.memory.end > firstPage+10*64 {
		t.Errorf("50 passes took %d bytes", f.p.memory.end-firstPage)
	}
}
