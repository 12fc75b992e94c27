// Package straggler finds workers and links that have become slow.
//
// A worker is slow when its layers take longer than before while those of other workers do not. Workers that slow
// down together share a busy machine. A link is slow when its sender is busy with it for a good part of the time
// and it carries far less than others do. These are the two kinds of tasks of a step's graph, computing and
// sending, so a verdict names the cause. The package has no clock; it counts steps.
//
// A worker whose device runs at a lowered clock is not slow as long as the clock explains its times, see
// [Detector.Lowered], and plans keep the times measured before, because the clock can be raised at any time.
package straggler

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
)

const (
	// settle is how many steps of a worker make its past.
	settle = 5
	// confirm is how many steps in a row must say the same.
	confirm = 3
	// leastSlow is the least part by which a slow worker takes longer than before.
	leastSlow = 0.2
	// noises is how many times a worker's usual deviation it must take longer, too.
	noises = 6
	// same is the part by which workers may differ that are taken to be equally fast; where a
	// worker's usual deviation is greater than that allows, it may differ by more.
	same = 0.15
	// history is how many steps make the usual deviation.
	history = 40
	// drift is how much of each small deviation becomes the past.
	drift = 0.02
	// easing is how many samples may still have passes at the clock before. It is the number of passes
	// that workers take medians of.
	easing = 8

	// linkBusy is the part of the time in which a slow link is busy at least.
	linkBusy = 0.2
	// linkSlow is the part of others' bandwidth that a slow link has at most.
	linkSlow = 0.25
)

// Sample holds the measurements of a worker at the end of a step.
type Sample struct {
	Worker id.WorkerID
	Step   int
	Layers []plan.LayerTime
	Links  []Sent
}

// Sent is the traffic from one worker to another since its last sample.
type Sent struct {
	To    id.WorkerID
	Bytes int64
	Busy  float64       // part of the time in which the link was busy
	Took  time.Duration // how long that was
}

// Kind is the subject of a verdict.
type Kind uint8

// The kinds.
const (
	Host Kind = iota
	Link
)

// Verdict reports that a worker or a link has become slow, or has recovered.
type Verdict struct {
	Kind   Kind
	Worker id.WorkerID
	To     id.WorkerID // of a link: the other end
	Speed  float64     // the part that is left of its own before; 1: it has recovered
	Reason string
}

// Slow reports whether it is slow now.
func (v Verdict) Slow() bool { return v.Speed < 1 }

// Detector holds measurements. The zero Detector is ready to use.
type Detector struct {
	workers map[id.WorkerID]*worker
	links   map[[2]id.WorkerID]*link
	usual   []float64 // what links carry, in order; nil until a sample needs it
}

type worker struct {
	step   int
	layers map[int]*layer
	ratio  float64   // of the newest sample to the past; 0 before there is one
	usual  []float64 // ratios in which nothing was wrong, over the others'
	speed  float64   // by the newest verdict
	other  []float64 // ratios of samples in a row that contradict it

	lowered float64 // how many times as long its clock lets it take at most; 0: it is its own
	before  float64 // the same of the clock before, which passes of easing samples may still be of
	easing  int
	under   float64 // of the newest sample: how many times as long it took for that reason; 0: before there is one
}

type layer struct {
	first []plan.LayerTime // before there is a past
	past  plan.LayerTime   // at the worker's own full speed; 0 before
	now   plan.LayerTime
}

type link struct {
	bandwidth float64 // of the newest sample
	carried   float64 // its best, bytes per second while busy
	was       float64 // carried, as of Detector.usual
	slow      bool
	runs      int
	sum       float64
}

func whole(t plan.LayerTime) float64 { return float64(t.Forward + t.Backward) }

// Forget drops a worker; its next sample is the first of a new incarnation.
func (d *Detector) Forget(w id.WorkerID) {
	delete(d.workers, w)
	for l := range d.links {
		if l[0] == w || l[1] == w {
			delete(d.links, l)
		}
	}
}

// Lowered says that a worker's device was set to a lower clock, or to another one: by how many times as long
// passes take there at most, as times grow no faster than the frequency falls. 1 says that the clock
// is the worker's own again.
func (d *Detector) Lowered(id id.WorkerID, by float64) {
	w := d.workers[id]
	if w == nil || !(by >= 1) {
		return
	}
	w.before, w.lowered, w.easing = w.allowed(), by, easing
}

// allowed is how many times as long its clock may let it take in the next sample.
func (w *worker) allowed() float64 {
	if w.easing > 0 {
		return max(1, w.lowered, w.before)
	}
	return max(1, w.lowered)
}

// Under returns how many times as long a worker's passes take as they would at its own clock, by the newest
// sample: 1 where that was not lowered. As long as samples may be of the clock before, it is what is possible at most.
func (d *Detector) Under(id id.WorkerID) float64 {
	w := d.workers[id]
	switch {
	case w == nil:
		return 1
	case w.easing > 0:
		return max(1, w.lowered)
	}
	return max(1, w.under)
}

// Observe adds a sample and returns the verdicts that follow from it.
func (d *Detector) Observe(s Sample) []Verdict {
	if d.workers == nil {
		d.workers, d.links = make(map[id.WorkerID]*worker), make(map[[2]id.WorkerID]*link)
	}
	w := d.workers[s.Worker]
	if w == nil || s.Step < w.step {
		w = &worker{speed: 1}
		d.workers[s.Worker] = w
	}
	if s.Step == w.step {
		return nil
	}
	w.step = s.Step
	var verdicts []Verdict
	if v, ok := d.judge(s.Worker, w, s.Layers); ok {
		verdicts = append(verdicts, v)
	}
	d.usual = nil
	for _, l := range s.Links {
		if v, ok := d.judgeLink(s.Worker, l); ok {
			verdicts = append(verdicts, v)
		}
	}
	return verdicts
}

func (d *Detector) judge(id id.WorkerID, w *worker, times []plan.LayerTime) (Verdict, bool) {
	if w.layers == nil {
		w.layers = make(map[int]*layer)
	}
	runs := make(map[int]bool)
	var ratios []float64
	for _, t := range times {
		if whole(t) <= 0 {
			continue
		}
		runs[t.Layer] = true
		l := w.layers[t.Layer]
		if l == nil {
			l = &layer{}
			w.layers[t.Layer] = l
		}
		if l.now = t; whole(l.past) > 0 {
			ratios = append(ratios, whole(t)/whole(l.past))
		}
	}
	for l := range w.layers {
		if !runs[l] {
			delete(w.layers, l) // they went elsewhere
		}
	}
	if len(ratios) > 0 {
		w.ratio = median(ratios)
	}
	// Layers that are new here have their past from what is known of the worker.
	for _, l := range w.layers {
		if whole(l.past) > 0 {
			continue
		}
		if l.first = append(l.first, l.now); len(l.first) >= settle {
			l.past, l.first = scaled(medianTime(l.first), w.speed), nil
		}
	}
	if len(ratios) == 0 {
		return Verdict{}, false
	}

	others := d.others(id)
	r := w.ratio / max(1, others) * w.speed // to what the verdict says
	own := w.allowed() == 1
	w.under = min(max(1, r), w.allowed())
	r /= w.under
	w.easing = max(0, w.easing-1)
	limit := leastSlow
	if n := len(w.usual); n > 0 { // of few, the deviation is not well known
		limit = max(limit, noises*spread(w.usual)*(1+settle/float64(n)))
	}
	far := w.speed == 1 && r > 1+limit && len(w.usual) >= settle || w.speed < 1 && r > 1+limit || w.speed < 1 && r < 1/(1+limit)
	if !far {
		w.other = nil
		if w.speed == 1 && own {
			w.usual = append(w.usual, r)
			w.usual = w.usual[max(0, len(w.usual)-history):]
			for _, l := range w.layers {
				if whole(l.past) > 0 {
					off := max(-limit, min(limit, whole(l.now)/whole(l.past)-1))
					l.past = scaled(l.past, 1+drift*off)
				}
			}
		}
		return Verdict{}, false
	}
	if len(w.other) > 0 && (r > 1) != (w.other[0] > 1) {
		w.other = nil
	}
	if w.other = append(w.other, r); len(w.other) < confirm {
		return Verdict{}, false
	}
	speed := w.speed / median(w.other)
	w.other = nil
	if speed > 1/(1+limit) {
		speed = 1
	}
	if speed == w.speed {
		return Verdict{}, false
	}
	w.speed = speed
	v := Verdict{Kind: Host, Worker: id, Speed: speed}
	if !v.Slow() {
		v.Reason = fmt.Sprintf("worker %d is back at its earlier speed", id)
		return v, true
	}
	v.Reason = fmt.Sprintf("worker %d computes at %.2f of its earlier speed, the others at %.2f: its host is slow (compute tasks of %d steps)",
		id, speed, 1/max(1, others), confirm)
	return v, true
}

// others returns the median ratio of all other workers, 1 where there are none.
func (d *Detector) others(id id.WorkerID) float64 {
	var ratios []float64
	for o, w := range d.workers {
		if o != id && w.ratio > 0 {
			ratios = append(ratios, w.ratio*w.speed/max(1, w.under))
		}
	}
	if len(ratios) == 0 {
		return 1
	}
	return median(ratios)
}

func (d *Detector) judgeLink(from id.WorkerID, s Sent) (Verdict, bool) {
	if s.Bytes <= 0 || s.Took <= 0 || !(s.Busy >= 0) {
		return Verdict{}, false
	}
	key := [2]id.WorkerID{from, s.To}
	l := d.links[key]
	if l == nil {
		l = &link{}
		d.links[key] = l
	}
	l.bandwidth = float64(s.Bytes) / s.Took.Seconds()
	var usual float64
	slow := s.Busy > linkBusy
	if slow || l.slow {
		usual = max(l.carried, d.carried(key))
		slow = slow && usual > 0 && l.bandwidth < linkSlow*usual
	}
	if slow == l.slow {
		l.runs, l.sum = 0, 0
		if !slow {
			l.carried = max(l.bandwidth, l.carried+drift*(l.bandwidth-l.carried))
		}
		return Verdict{}, false
	}
	l.runs++
	l.sum += l.bandwidth
	if l.runs < confirm {
		return Verdict{}, false
	}
	mean := l.sum / float64(l.runs)
	l.slow, l.runs, l.sum = slow, 0, 0
	v := Verdict{Kind: Link, Worker: from, To: s.To, Speed: 1, Reason: fmt.Sprintf("the link from worker %d to worker %d is back at its earlier speed", from, s.To)}
	if slow {
		v.Speed = mean / usual
		v.Reason = fmt.Sprintf("the link from worker %d to worker %d carries %.3g MB/s and was busy for %.0f %% of the time: the link is slow (send tasks of %d steps)",
			from, s.To, mean/1e6, 100*s.Busy, confirm)
	}
	return v, true
}

// carried returns the median of what all links carry but one and its way back; 0 where nothing is known. The links of a worker are judged
// by what was known before its sample.
func (d *Detector) carried(but [2]id.WorkerID) float64 {
	if d.usual == nil {
		d.usual = []float64{}
		for _, l := range d.links {
			if l.carried > 0 {
				d.usual = append(d.usual, l.carried)
			}
			l.was = l.carried
		}
		slices.Sort(d.usual)
	}
	var skip []int
	for _, k := range [][2]id.WorkerID{but, {but[1], but[0]}} {
		if l := d.links[k]; l != nil && l.was > 0 {
			i, _ := slices.BinarySearch(d.usual, l.was)
			if len(skip) > 0 && skip[0] == i {
				i++
			}
			skip = append(skip, i)
		}
	}
	slices.Sort(skip)
	at := func(i int) float64 {
		for _, x := range skip {
			if i >= x {
				i++
			}
		}
		return d.usual[i]
	}
	n := len(d.usual) - len(skip)
	if n == 0 {
		return 0
	}
	return (at((n-1)/2) + at(n/2)) / 2
}

// Times returns the times to make plans with. They change only with a verdict and
// are the same for workers that are about equally fast. settled reports whether the
// worker's times are known.
func (d *Detector) Times(id id.WorkerID) (t plan.Times, settled bool) {
	w := d.workers[id]
	if w == nil || len(w.layers) == 0 {
		return t, false
	}
	var numbers []int
	for l, v := range w.layers {
		if whole(v.past) == 0 {
			return t, false
		}
		numbers = append(numbers, l)
	}
	slices.Sort(numbers)
	for _, l := range numbers {
		own := w.layers[l].past
		var peers []plan.LayerTime
		for _, o := range d.workers {
			if ol := o.layers[l]; ol != nil && whole(ol.past) > 0 {
				peers = append(peers, ol.past)
			}
		}
		band := max(same, noises/2*spread(w.usual))
		if mid := medianTime(peers); math.Abs(whole(own)/whole(mid)-1) < band {
			own = mid
		}
		own = scaled(own, 1/w.speed)
		own.Layer = l
		t.Layers = append(t.Layers, own)
	}
	for k, l := range d.links {
		if k[0] == id && l.slow {
			t.Links = append(t.Links, plan.LinkTime{To: k[1], Bandwidth: l.bandwidth})
		}
	}
	slices.SortFunc(t.Links, func(a, b plan.LinkTime) int { return int(a.To - b.To) })
	return t, true
}

func scaled(t plan.LayerTime, k float64) plan.LayerTime {
	t.Forward, t.Backward = time.Duration(float64(t.Forward)*k), time.Duration(float64(t.Backward)*k)
	return t
}

// medianTime returns the time of the median whole.
func medianTime(all []plan.LayerTime) plan.LayerTime {
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, func(a, b plan.LayerTime) int { return int(a.Forward + a.Backward - b.Forward - b.Backward) })
	return sorted[(len(sorted)-1)/2]
}

// median returns the median of some numbers, of two the mean.
func median(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// spread returns the median deviation from the median.
func spread(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	mid := median(all)
	off := make([]float64, len(all))
	for i, x := range all {
		off[i] = math.Abs(x - mid)
	}
	return median(off)
}
