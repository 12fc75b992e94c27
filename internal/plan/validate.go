package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/id"
)

// Fault is a broken property of a plan; Number is that in the comment of
// [Plan].
type Fault struct {
	Number int
	What   string
}

func (f Fault) String() string { return fmt.Sprintf("[%d] %s", f.Number, f.What) }

// InvalidError lists all broken properties of a plan.
type InvalidError struct {
	Version id.Version
	Faults  []Fault // the first maxFaults
	More    int     // that are not listed
}

// maxFaults bounds what one bad plan can make us say.
const maxFaults = 50

func (e *InvalidError) Error() string {
	var parts []string
	for _, f := range e.Faults {
		parts = append(parts, f.String())
	}
	if e.More > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", e.More))
	}
	return fmt.Sprintf("plan %v is invalid: %s", e.Version, strings.Join(parts, "; "))
}

// Has reports whether a property is broken.
func (e *InvalidError) Has(number int) bool {
	return slices.ContainsFunc(e.Faults, func(f Fault) bool { return f.Number == number })
}

func (e *InvalidError) add(number int, format string, args ...any) {
	if len(e.Faults) == maxFaults {
		e.More++
		return
	}
	e.Faults = append(e.Faults, Fault{number, fmt.Sprintf(format, args...)})
}

func (e *InvalidError) result() error {
	if len(e.Faults) == 0 {
		return nil
	}
	return e
}

// Validate checks a plan for a model with the given layers, of which it reads
// the tensors only. It may be given anything: it neither panics nor works
// longer than the size of the plan and of the model explains. The error is an
// [*InvalidError] with all that is wrong.
func (p *Plan) Validate(layers []Layer) error {
	e := &InvalidError{Version: p.Version}
	if p.Version.Generation < 1 || p.Version.N < 1 || p.FromStep < 1 {
		e.add(1, "version %v from step %d", p.Version, p.FromStep)
	}
	for i, w := range p.Workers {
		if w.ID < 0 || w.Incarnation < 0 || i > 0 && p.Workers[i-1].ID >= w.ID {
			e.add(2, "worker %d, incarnation %d at position %d", w.ID, w.Incarnation, i)
		}
	}
	hosts, perHost := p.hosts()
	known := func(w id.WorkerID) bool { _, ok := hosts[w]; return ok }
	if p.ModelHost != "" && perHost[p.ModelHost] == 0 {
		e.add(2, "the model goes to %q, which has no worker", p.ModelHost)
	}
	p.validateStages(e, len(layers), known)
	p.validateShards(e, layers)
	for _, s := range p.Shards {
		p.validateHolders(e, s, hosts, perHost)
	}
	for i, s := range p.Settled {
		if !p.InStep || s.Stage < 0 || s.Stage >= len(p.Stages) || s.Micro < 0 || s.Micro >= p.Micros() ||
			i > 0 && p.Settled[i-1].Compare(s) >= 0 {
			e.add(13, "settled %v", s)
		}
	}
	for i, f := range p.First {
		if !p.InStep || f.Stage < 0 || f.Stage >= len(p.Stages) || f.Micro < 0 || f.Micro >= p.Micros() || !p.Runs(f, p.FromStep) ||
			i > 0 && p.First[i-1].Compare(f) >= 0 {
			e.add(13, "first %v", f)
		}
	}
	if p.Degraded && (p.InStep || !p.LacksMirrors()) {
		e.add(14, "nothing is missing for it to be degraded")
	}
	return e.result()
}

func (p *Plan) validateStages(e *InvalidError, layers int, known func(id.WorkerID) bool) {
	at := 0
	for i, s := range p.Stages {
		if s.Lo != at || s.Hi <= s.Lo || s.Hi > layers {
			e.add(3, "stage %d has layers [%d,%d) of %d, and those before it end at %d", i, s.Lo, s.Hi, layers, at)
		}
		at = s.Hi
	}
	if at != layers || layers == 0 {
		e.add(3, "stages end at layer %d of %d", at, layers)
	}
	type place struct {
		stage  int
		worker id.WorkerID
	}
	limits := make(map[place]int, len(p.Limits))
	for _, l := range p.Limits {
		at := place{l.Stage, l.Worker}
		if _, twice := limits[at]; twice {
			e.add(6, "stage %d has two limits for worker %d", l.Stage, l.Worker)
		}
		limits[at] = l.Forwards
		if l.Lead < 0 || l.Lead > l.Forwards {
			e.add(6, "stage %d has a lead of %d for worker %d, not 0 to its limit of %d", l.Stage, l.Lead, l.Worker, l.Forwards)
		}
	}
	members := 0
	for i, s := range p.Stages {
		if len(s.Workers) == 0 {
			e.add(4, "stage %d has no worker", i)
		}
		seen := make(map[id.WorkerID]bool, len(s.Workers))
		for _, w := range s.Workers {
			if seen[w] || !known(w) {
				e.add(4, "stage %d names worker %d, which is there twice or not in the plan", i, w)
			}
			seen[w] = true
			if l, ok := limits[place{i, w}]; !ok || l < len(p.Stages)-i {
				e.add(6, "stage %d allows worker %d %d forward passes, not at least %d", i, w, l, len(p.Stages)-i)
			}
		}
		members += len(seen)
		if i >= len(p.Route) {
			continue
		}
		lost := 0
		for _, w := range p.Route[i] {
			if !seen[w] {
				lost++
			}
		}
		if lost > 0 {
			e.add(5, "stage %d routes %s to workers that are not its own", i, Count(lost, "micro-batch"))
		}
		if m := len(p.Route[i]); m < 1 || m != len(p.Route[0]) {
			e.add(5, "stage %d routes %s, and the first one %d", i, Count(m, "micro-batch"), len(p.Route[0]))
		}
		if n := p.MostSums(i); n > p.Buffers {
			e.add(12, "stage %d needs %d sums of gradients on one worker, and %d are allowed", i, n, p.Buffers)
		}
	}
	if len(p.Route) != len(p.Stages) {
		e.add(5, "%d routes for %s", len(p.Route), Count(len(p.Stages), "stage"))
	}
	if len(p.Limits) > members {
		e.add(6, "%d limits for %d places", len(p.Limits), members)
	}
}

func (p *Plan) validateShards(e *InvalidError, layers []Layer) {
	// at is where the next shard has to begin.
	layer, at := 0, 0
	skip := func() {
		for layer < len(layers) && at == layers[layer].Size() {
			layer, at = layer+1, 0
		}
	}
	skip()
	for i, s := range p.Shards {
		if s.Layer < 0 || s.Layer >= len(layers) || s.Lo < 0 || s.Hi <= s.Lo || s.Hi > layers[s.Layer].Size() {
			e.add(7, "shard %d is [%d,%d) of layer %d", i, s.Lo, s.Hi, s.Layer)
			continue
		}
		if s.Layer != layer || s.Lo != at {
			e.add(7, "shard %d begins at %d of layer %d, and the one before it ends at %d of layer %d", i, s.Lo, s.Layer, at, layer)
		}
		if !atBlock(layers[s.Layer].Tensors, s.Lo) || !atBlock(layers[s.Layer].Tensors, s.Hi) {
			e.add(8, "shard %d, [%d,%d) of layer %d, does not lie at borders of blocks", i, s.Lo, s.Hi, s.Layer)
		}
		layer, at = s.Layer, s.Hi
		skip()
	}
	if layer < len(layers) {
		e.add(7, "no shard has parameter %d of layer %d", at, layer)
	}
}

// atBlock reports whether a position in a layer is a border of blocks.
func atBlock(tensors []int, at int) bool {
	for _, n := range tensors {
		if at <= n {
			return at == n || at%kernel.Block == 0
		}
		at -= n
	}
	return false
}

func (p *Plan) validateHolders(e *InvalidError, s Shard, hosts map[id.WorkerID]string, perHost map[string]int) {
	home, ok := hosts[s.Owner]
	if !ok {
		e.add(9, "worker %d owns [%d,%d) of layer %d and is not in the plan", s.Owner, s.Lo, s.Hi, s.Layer)
		return
	}
	atHome, away := 0, 0
	for i, m := range s.Mirrors {
		host, ok := hosts[m]
		if !ok || m == s.Owner || slices.Contains(s.Mirrors[:i], m) || i >= p.Mirrors {
			e.add(10, "mirror %d of [%d,%d) of layer %d is worker %d", i, s.Lo, s.Hi, s.Layer, m)
			return
		}
		if host == home {
			atHome++
		} else {
			away++
		}
	}
	if p.InStep || p.Degraded {
		return
	}
	if atHome > 0 && away < len(hosts)-perHost[home] {
		e.add(11, "[%d,%d) of layer %d has a mirror on its owner's host %q and could have it elsewhere", s.Lo, s.Hi, s.Layer, home)
	}
	if want := min(p.Mirrors, len(hosts)-1); len(s.Mirrors) < want {
		e.add(11, "[%d,%d) of layer %d has %d of %s", s.Lo, s.Hi, s.Layer, len(s.Mirrors), Count(want, "mirror"))
	}
}

// LacksMirrors reports whether property 11 would not hold for a boundary plan that
// is not degraded.
func (p *Plan) LacksMirrors() bool {
	hosts, perHost := p.hosts()
	whole := Plan{Mirrors: p.Mirrors}
	for _, s := range p.Shards {
		var e InvalidError
		if whole.validateHolders(&e, s, hosts, perHost); e.Has(11) {
			return true
		}
	}
	return false
}

// Protected reports whether every shard has all the mirrors that are wanted,
// on other hosts than its owner's as far as there are any.
func (p *Plan) Protected() bool {
	return p.Mirrors < max(1, len(p.Workers)) && !p.LacksMirrors()
}

// hosts returns the host of every worker, and how many workers each has.
func (p *Plan) hosts() (hosts map[id.WorkerID]string, perHost map[string]int) {
	hosts = make(map[id.WorkerID]string, len(p.Workers))
	perHost = make(map[string]int)
	for _, w := range p.Workers {
		if _, twice := hosts[w.ID]; !twice {
			perHost[w.Host]++
		}
		hosts[w.ID] = w.Host
	}
	return hosts, perHost
}
