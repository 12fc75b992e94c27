package straggler

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

const ms = time.Millisecond

// series feeds a detector with what workers measure.
type series struct {
	d     Detector
	step  int
	noise float64 // standard deviation of a time, relative
	rand  *rand.Rand
	load  float64 // of the machine, by which all take longer
	speed []float64
	got   []Verdict
	at    []int // steps of verdicts
}

func newSeries(workers int, noise float64) *series {
	s := &series{noise: noise, rand: rand.New(rand.NewPCG(7, uint64(workers))), load: 1}
	for range workers {
		s.speed = append(s.speed, 1)
	}
	return s
}

// run runs some steps. Workers have stages of two layers, two workers each.
func (s *series) run(steps int) {
	for range steps {
		s.step++
		for w := range s.speed {
			sample := Sample{Worker: id.WorkerID(w), Step: s.step}
			all := math.Exp(s.noise*s.rand.NormFloat64()) * s.load / s.speed[w]
			for l := range 2 {
				took := time.Duration(all * float64(l+1) * float64(ms))
				sample.Layers = append(sample.Layers, plan.LayerTime{Layer: w/2*2 + l, Forward: took, Backward: 2 * took})
			}
			for _, v := range s.d.Observe(sample) {
				s.got, s.at = append(s.got, v), append(s.at, s.step)
			}
		}
	}
}

func TestSlowHost(t *testing.T) {
	for _, c := range []struct {
		workers      int
		noise, speed float64
	}{{8, 0.01, 0.5}, {8, 0.05, 0.5}, {2, 0.03, 0.6}, {1, 0.02, 0.25}, {32, 0.05, 0.1}, {3, 0, 0.8}} {
		s := newSeries(c.workers, c.noise)
		s.run(20)
		s.speed[c.workers/2] = c.speed
		s.run(30)
		if len(s.got) != 1 || s.got[0].Kind != Host || s.got[0].Worker != id.WorkerID(c.workers/2) || math.Abs(s.got[0].Speed/c.speed-1) > 0.1 || s.at[0] > 30 {
			t.Errorf("%+v: verdicts %+v at %v", c, s.got, s.at)
			continue
		}
		if v := s.got[0]; v.Reason == "" || !v.Slow() {
			t.Errorf("%+v", v)
		}
		times, ok := s.d.Times(id.WorkerID(c.workers / 2))
		if !ok || len(times.Layers) != 2 || math.Abs(float64(times.Layers[0].Forward)*c.speed/float64(ms)-1) > 0.15 {
			t.Errorf("%+v: times %+v", c, times)
		}
		s.speed[c.workers/2] = 1
		s.run(30)
		if len(s.got) != 2 || s.got[1].Slow() || s.got[1].Worker != s.got[0].Worker || s.at[1] > 60 {
			t.Errorf("%+v: verdicts %+v at %v", c, s.got, s.at)
		}
	}
}

// A slow worker that becomes slower is another verdict; a busy machine, an outlier and noise
// are none.
func TestOtherChanges(t *testing.T) {
	s := newSeries(4, 0.02)
	s.run(20)
	s.speed[1] = 0.5
	s.run(10)
	s.speed[1] = 0.25
	s.run(10)
	if len(s.got) != 2 || math.Abs(s.got[1].Speed-0.25) > 0.03 {
		t.Errorf("verdicts %+v", s.got)
	}

	s = newSeries(4, 0.02)
	s.run(20)
	s.load = 3
	s.run(20)
	s.load = 1
	s.speed[2] = 0.1
	s.run(2)
	s.speed[2] = 1
	s.run(20)
	if len(s.got) != 0 {
		t.Errorf("verdicts %+v", s.got)
	}
	a, ok := s.d.Times(0)
	b, ok2 := s.d.Times(1)
	if !ok || !ok2 || a.Layers[0] != b.Layers[0] || a.Layers[1] != b.Layers[1] {
		t.Errorf("workers that are equally fast have %+v and %+v", a, b)
	}

	s = newSeries(8, 0.2)
	if s.run(3000); len(s.got) != 0 {
		t.Errorf("noise alone gives %+v at %v", s.got, s.at)
	}
}

func TestUnsettled(t *testing.T) {
	s := newSeries(2, 0)
	s.run(settle - 1)
	if _, ok := s.d.Times(0); ok {
		t.Error("times are known before there is a past")
	}
	s.run(1)
	if _, ok := s.d.Times(0); !ok {
		t.Error("times are not known")
	}
	if _, ok := s.d.Times(9); ok {
		t.Error("times of an unknown worker are known")
	}
	s.d.Forget(0)
	if _, ok := s.d.Times(0); ok {
		t.Error("times of another life are known")
	}
}

// Layers that come to a slow worker have the past that its speed says.
func TestNewLayers(t *testing.T) {
	s := newSeries(4, 0)
	s.run(20)
	s.speed[0] = 0.5
	s.run(10)
	feed := func() {
		s.step++
		for w := range s.speed {
			took := time.Duration(float64(ms) / s.speed[w])
			s.got = append(s.got, s.d.Observe(Sample{Worker: id.WorkerID(w), Step: s.step, Layers: []plan.LayerTime{{Layer: 7, Forward: took, Backward: took}}})...)
		}
	}
	for range 20 {
		feed()
	}
	s.speed[0] = 1
	for range 10 {
		feed()
	}
	if len(s.got) != 2 || s.got[1].Slow() {
		t.Errorf("verdicts %+v", s.got)
	}
	if times, ok := s.d.Times(0); !ok || len(times.Layers) != 1 || times.Layers[0] != (plan.LayerTime{Layer: 7, Forward: ms, Backward: ms}) {
		t.Errorf("times %+v", times)
	}
}

func TestSlowLink(t *testing.T) {
	var d Detector
	var got []Verdict
	step := 0
	feed := func(steps int, slow float64) {
		for range steps {
			step++
			for w := range id.WorkerID(3) {
				s := Sample{Worker: w, Step: step}
				for to := range id.WorkerID(3) {
					if to == w {
						continue
					}
					sent := Sent{To: to, Bytes: 1 << 20, Busy: 0.02, Took: 2 * ms}
					if w == 0 && to == 2 && slow < 1 {
						sent.Took, sent.Busy = time.Duration(2*float64(ms)/slow), 0.6
					}
					s.Links = append(s.Links, sent)
				}
				s.Links = append(s.Links, Sent{To: 9}, Sent{To: 9, Bytes: -1, Took: ms, Busy: math.NaN()})
				got = append(got, d.Observe(s)...)
			}
		}
	}
	feed(10, 1)
	feed(10, 0.01)
	if len(got) != 1 || got[0].Kind != Link || got[0].Worker != 0 || got[0].To != 2 || got[0].Speed > 0.02 || step > 20 {
		t.Fatalf("verdicts %+v", got)
	}
	feed(10, 1)
	if len(got) != 2 || got[1].Slow() || got[1].To != 2 {
		t.Errorf("verdicts %+v", got)
	}
}

// A worker whose clock was lowered is not slow by that, neither then nor when it is put back, and plans see the times
// of before; what is more than the clock explains is found.
func TestLoweredClock(t *testing.T) {
	for _, noise := range []float64{0, 0.03} {
		s := newSeries(8, noise)
		s.run(20)
		before, _ := s.d.Times(3)
		s.d.Lowered(3, 1.5)
		s.speed[3] = 1 / 1.4 // times grow less than the frequency falls
		s.run(40)
		if under := s.d.Under(3); len(s.got) > 0 || math.Abs(under/1.4-1) > 0.15 {
			t.Errorf("lowered: verdicts %+v, under %v", s.got, under)
		}
		if now, ok := s.d.Times(3); !ok || math.Abs(float64(now.Layers[0].Forward)/float64(before.Layers[0].Forward)-1) > 0.03 {
			t.Errorf("plans see %+v, before %+v", now, before)
		}
		s.d.Lowered(3, 1)
		s.run(4) // the worker's medians still have passes at the lower clock
		s.speed[3] = 1
		s.run(40)
		if under := s.d.Under(3); len(s.got) > 0 || under != 1 {
			t.Errorf("put back: verdicts %+v, under %v", s.got, under)
		}

		s.d.Lowered(3, 1.5)
		s.speed[3] = 1 / 1.5
		s.run(20)
		s.speed[3] = 0.5 / 1.5
		s.run(10)
		if len(s.got) != 1 || s.got[0].Worker != 3 || math.Abs(s.got[0].Speed/0.5-1) > 0.1 {
			t.Errorf("slow at a lower clock: verdicts %+v", s.got)
		}
		s.d.Lowered(3, 1)
		s.speed[3] = 1
		s.run(30)
		if n := len(s.got); n < 2 || s.got[n-1].Slow() {
			t.Errorf("recovered: verdicts %+v", s.got)
		}
	}
	var none Detector
	none.Lowered(1, 2)
	if none.Under(1) != 1 {
		t.Error("a worker that is not known")
	}
}

// What other links carry is the median of all but one and its way back.
func TestCarried(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		d := Detector{links: make(map[[2]id.WorkerID]*link)}
		n := 2 + r.IntN(4)
		for a := range id.WorkerID(n) {
			for b := range id.WorkerID(n) {
				if a != b && r.IntN(4) > 0 {
					d.links[[2]id.WorkerID{a, b}] = &link{carried: float64(r.IntN(4))}
				}
			}
		}
		for but := range d.links {
			var rest []float64
			for k, l := range d.links {
				if l.carried > 0 && k != but && k != [2]id.WorkerID{but[1], but[0]} {
					rest = append(rest, l.carried)
				}
			}
			want := 0.
			if len(rest) > 0 {
				want = median(rest)
			}
			if got := d.carried(but); got != want {
				t.Fatalf("%v of %v without %v, want %v", got, d.usual, but, want)
			}
		}
	}
}
