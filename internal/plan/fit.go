package plan

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/id"
)

// With returns the profile with what workers have measured: times of layers, speeds,
// links and memory. What is not measured stays as it was, once anything is measured
// with these exceptions: a layer that no worker has run has the time of the layers with the
// same tensors and output, else one in proportion to its parameters; a worker that has
// measured nothing has speed 1.
//
// A worker's time of a layer is taken to be the layer's over the worker's speed. Both are
// medians of the other, so that single outliers do not count, and speed 1 is that of the
// better half of the workers. Layers with the same tensors and output are taken to be the
// same work, which makes workers of different stages comparable; those that have no such
// layer in common are taken to be equally fast in the median. Speeds that differ from 1 by
// less than a twentieth are 1, and all others are rounded to twentieths: a plan is not to
// follow noise.
func (p Profile) With(times map[id.WorkerID]Times) Profile {
	ids := make([]id.WorkerID, 0, len(times))
	for w, t := range times {
		if len(t.Layers) > 0 || len(t.Links) > 0 || t.Memory > 0 {
			ids = append(ids, w)
		}
	}
	if len(ids) == 0 {
		return p
	}
	slices.Sort(ids)
	fit := newFit(p.Layers, ids, times)
	if len(fit.seen) > 0 {
		p.Layers, p.Speed = fit.solve(p.Layers)
	}
	links, memory := make(map[Link]LinkSpeed, len(p.Links)), make(map[id.WorkerID]int64, len(p.Memory))
	maps.Copy(links, p.Links)
	maps.Copy(memory, p.Memory)
	for _, w := range ids {
		for _, l := range times[w].Links {
			if l.To == w || !within(l.Latency) || !(l.Bandwidth >= 0) {
				continue
			}
			// Both ends have measured it: the slower one is right.
			pace := links[link(w, l.To)]
			pace.Latency = max(pace.Latency, l.Latency)
			if l.Bandwidth > 0 && (pace.Bandwidth == 0 || l.Bandwidth < pace.Bandwidth) {
				pace.Bandwidth = l.Bandwidth
			}
			links[link(w, l.To)] = pace
		}
		if m := times[w].Memory; m > 0 {
			memory[w] = m
		}
	}
	p.Links, p.Memory = links, memory
	return p
}

// within reports whether a time can be that of a layer or a message; it comes from outside.
func within(d time.Duration) bool { return d >= 0 && d <= time.Hour }

// fit finds speeds of workers and times of kinds of layers.
type fit struct {
	ids    []id.WorkerID
	kind   []int // of each layer
	kinds  int
	seen   []observation
	speeds []float64 // by worker
	base   []float64 // seconds at speed 1, by kind; 0: not measured
}

type observation struct {
	worker, kind      int
	forward, backward float64 // seconds
}

func newFit(layers []Layer, ids []id.WorkerID, times map[id.WorkerID]Times) *fit {
	f := &fit{ids: ids, kind: make([]int, len(layers)), speeds: make([]float64, len(ids))}
	known := make(map[string]int)
	for i, l := range layers {
		name := fmt.Sprint(l.Tensors, l.Output)
		if len(l.Tensors) == 0 { // such a layer can be anything
			name = fmt.Sprint("layer ", i)
		}
		k, ok := known[name]
		if !ok {
			k = len(known)
			known[name] = k
		}
		f.kind[i] = k
	}
	f.kinds = len(known)
	f.base = make([]float64, f.kinds)
	for i, w := range ids {
		f.speeds[i] = 1
		for _, l := range times[w].Layers {
			if l.Layer >= 0 && l.Layer < len(layers) && within(l.Forward) && within(l.Backward) && l.Forward+l.Backward > 0 {
				f.seen = append(f.seen, observation{i, f.kind[l.Layer], l.Forward.Seconds(), l.Backward.Seconds()})
			}
		}
	}
	return f
}

// fitRounds bounds how often speeds and times are found from each other. Two rounds are
// enough where all workers have a layer in common.
const fitRounds = 8

func (f *fit) solve(layers []Layer) ([]Layer, map[id.WorkerID]float64) {
	byKind, byWorker := make([][]float64, f.kinds), make([][]float64, len(f.ids))
	for range fitRounds {
		for k := range byKind {
			byKind[k] = byKind[k][:0]
		}
		for _, o := range f.seen {
			byKind[o.kind] = append(byKind[o.kind], (o.forward+o.backward)*f.speeds[o.worker])
		}
		for k, list := range byKind {
			if len(list) > 0 {
				f.base[k] = lowerMedian(list)
			}
		}
		for w := range byWorker {
			byWorker[w] = byWorker[w][:0]
		}
		for _, o := range f.seen {
			byWorker[o.worker] = append(byWorker[o.worker], f.base[o.kind]/(o.forward+o.backward))
		}
		for w, list := range byWorker {
			if len(list) > 0 {
				f.speeds[w] = lowerMedian(list)
			}
		}
	}
	speeds := make(map[id.WorkerID]float64, len(f.ids))
	for i, w := range f.ids {
		const steps = 20
		v := max(1, math.Round(f.speeds[i]*steps)) / steps
		if math.Abs(f.speeds[i]-1) < 1.0/steps {
			v = 1
		}
		if v != 1 {
			speeds[w] = v
		}
	}
	// The forward pass has the median share of the whole.
	shares := make([][]float64, f.kinds)
	for _, o := range f.seen {
		shares[o.kind] = append(shares[o.kind], o.forward/(o.forward+o.backward))
	}
	measured := slices.Clone(layers)
	var time1, size1 float64 // of what is measured
	for i := range measured {
		if base := f.base[f.kind[i]]; base > 0 {
			share := lowerMedian(shares[f.kind[i]])
			measured[i].Forward, measured[i].Backward = seconds(base*share), seconds(base*(1-share))
			time1 += base
			size1 += float64(measured[i].Size())
		}
	}
	for i := range measured {
		if f.base[f.kind[i]] == 0 && size1 > 0 {
			work := time1 / size1 * float64(measured[i].Size())
			measured[i].Forward, measured[i].Backward = seconds(work/3), seconds(work*2/3)
		}
	}
	return measured, speeds
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// lowerMedian sorts a list and returns its median, of two the lesser.
func lowerMedian(list []float64) float64 {
	slices.Sort(list)
	return list[(len(list)-1)/2]
}
