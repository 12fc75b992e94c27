package plan

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Worker is a worker's session: one life of a process.
type Worker struct {
	ID          id.WorkerID `json:"id"`
	Incarnation int         `json:"incarnation"`
	Host        string      `json:"host,omitempty"`
}

// Stage is a contiguous range of layers and the workers that hold them.
type Stage struct {
	Lo      int           `json:"lo"` // layers [Lo, Hi)
	Hi      int           `json:"hi"`
	Workers []id.WorkerID `json:"workers"` // in the order of their ranks
}

// Limit is how many forward passes of a stage may be in flight on a worker that runs one pass at a time. While fewer than Lead
// are, forward passes come before backward passes.
type Limit struct {
	Stage    int         `json:"stage"`
	Worker   id.WorkerID `json:"worker"`
	Forwards int         `json:"forwards"`
	Lead     int         `json:"lead,omitempty"`
}

// Shard is the range [Lo, Hi) of one layer's flattened parameters, with its
// optimizer state.
type Shard struct {
	Layer   int           `json:"layer"`
	Lo      int           `json:"lo"`
	Hi      int           `json:"hi"`
	Owner   id.WorkerID   `json:"owner"`
	Mirrors []id.WorkerID `json:"mirrors,omitempty"`
}

// Holds reports whether a worker is the owner or a mirror.
func (s *Shard) Holds(w id.WorkerID) bool { return s.Owner == w || slices.Contains(s.Mirrors, w) }

// Plan assigns the layers, micro-batches and shards of a job to workers. A valid plan has these properties;
// [Plan.Validate] reports broken ones by their numbers.
//
//  1. Version and FromStep count from 1.
//  2. Workers are in ascending order of their IDs, each once. ModelHost is empty or the host of one of them.
//  3. Every layer is in exactly one stage; stages are in the order of layers
//     and none is empty.
//  4. Every stage has workers, which are workers of the plan, each once.
//  5. Every micro-batch is routed once in every stage, to a worker of that
//     stage. So the forward and the backward pass of a stage and micro-batch
//     run on one worker.
//  6. There is one limit for every worker of every stage, and it is at least
//     the number of stages from that one on. Its lead is not negative and not above it.
//  7. Every parameter is in exactly one shard; shards are in the order of
//     parameters and none is empty.
//  8. Borders of shards are borders of blocks: a tensor's blocks have
//     kernel.Block elements, and the last one what is left.
//  9. The owner of a shard is a worker of the plan.
//  10. Its mirrors are workers of the plan, each once, never the owner, and not
//     more than Mirrors.
//  11. In a boundary plan that is not Degraded, a mirror is on the owner's host
//     only if all workers of other hosts are mirrors of the shard already, and
//     a shard has fewer than Mirrors mirrors only if all other workers are.
//  12. No worker has to keep more than Buffers sums of gradients of a layer:
//     what it runs of a stage in a step are the leaves of at most that many
//     disjoint nodes of the gradient tree.
//  13. Only an in-step plan has settled pairs; they are in order, each once.
//  14. A plan is Degraded only if it is a boundary plan and a shard has fewer
//     mirrors than [11] wants, or has them on the wrong hosts.
//
// And of a plan and the one before it, which tests check (plantest.ValidateAfter):
//
//  15. The version grows, and FromStep does not fall.
//  16. The number of micro-batches stays.
//  17. An in-step plan keeps the stages' layers and the shards' borders, and
//     brings no new worker.
//  18. In an in-step plan, a living owner stays; a lost one is followed by one
//     of its mirrors, and no worker becomes a mirror.
//  19. The number of Mirrors wanted stays.
type Plan struct {
	Version id.Version `json:"version"`
	// FromStep is the first step that may run under the plan. An in-step plan
	// is for the rest of this step.
	FromStep int  `json:"from_step"`
	InStep   bool `json:"in_step,omitempty"`

	Workers []Worker `json:"workers"`
	// ModelHost is the host that gets the model when the run ends, one with workers. "" means that of the first worker.
	ModelHost string `json:"model_host,omitempty"`

	Stages []Stage         `json:"stages"`
	Route  [][]id.WorkerID `json:"route"` // [stage][micro-batch]
	// Settled pairs do not run again in this step: a lost worker completed them, and the owners of their stage
	// have their gradients.
	Settled []graph.Pair `json:"settled,omitempty"`
	// First are pairs that idle workers wait for, and those that run again and without which pairs stay in flight: their
	// workers begin them before others, and before backward passes.
	First   []graph.Pair `json:"first,omitempty"`
	Limits  []Limit      `json:"limits"` // by stage, then in the order of its workers
	Buffers int          `json:"buffers"`

	Shards  []Shard `json:"shards"`
	Mirrors int     `json:"mirrors"` // wanted for each shard
	// Degraded says that mirrors are missing, or on the wrong hosts, because workers left, or joined without shards.
	Degraded bool `json:"degraded,omitempty"`
}

// Parse reads a plan from its JSON. The plan is not validated.
func Parse(b []byte) (Plan, error) {
	var p Plan
	if err := json.Unmarshal(b, &p); err != nil {
		return Plan{}, fmt.Errorf("plan: %w", err)
	}
	return p, nil
}

// Micros returns the number of micro-batches of a step.
func (p *Plan) Micros() int {
	if len(p.Route) == 0 {
		return 0
	}
	return len(p.Route[0])
}

// Layers returns the number of layers.
func (p *Plan) Layers() int {
	if len(p.Stages) == 0 {
		return 0
	}
	return p.Stages[len(p.Stages)-1].Hi
}

// StageOf returns the stage of a layer, -1 if there is none.
func (p *Plan) StageOf(layer int) int {
	return slices.IndexFunc(p.Stages, func(s Stage) bool { return s.Lo <= layer && layer < s.Hi })
}

// Worker returns the session of a worker of the plan.
func (p *Plan) Worker(worker id.WorkerID) (w Worker, ok bool) {
	i, ok := slices.BinarySearchFunc(p.Workers, worker, func(w Worker, worker id.WorkerID) int { return cmp.Compare(w.ID, worker) })
	if !ok {
		return Worker{}, false
	}
	return p.Workers[i], true
}

// PickModelHost makes the first of the wanted hosts that has a worker in the plan its ModelHost.
func (p *Plan) PickModelHost(wanted []string) {
	p.ModelHost = ""
	for _, host := range wanted {
		if slices.ContainsFunc(p.Workers, func(w Worker) bool { return w.Host == host }) {
			p.ModelHost = host
			return
		}
	}
}

// Collector returns the worker that collects the state of the job at the end and writes the model: the first on ModelHost.
// The plan has workers.
func (p *Plan) Collector() Worker {
	return p.Workers[max(0, slices.IndexFunc(p.Workers, func(w Worker) bool { return w.Host == p.ModelHost }))]
}

// OnHost returns which one a worker is, from 0 on, of how many that the plan has on its host. It is one of the plan's.
func (p *Plan) OnHost(id id.WorkerID) (i, n int) {
	w, _ := p.Worker(id)
	for _, x := range p.Workers {
		if x.Host != w.Host {
			continue
		}
		if x.ID < id {
			i++
		}
		n++
	}
	return i, n
}

// StagesOf returns the stages a worker serves.
func (p *Plan) StagesOf(id id.WorkerID) []int {
	var stages []int
	for s, st := range p.Stages {
		if slices.Contains(st.Workers, id) {
			stages = append(stages, s)
		}
	}
	return stages
}

// LayersOf returns the layers of the stages in which a worker has a rank, in ascending order.
func (p *Plan) LayersOf(id id.WorkerID) (layers []int) {
	for _, st := range p.Stages {
		if slices.Contains(st.Workers, id) {
			for l := st.Lo; l < st.Hi; l++ {
				layers = append(layers, l)
			}
		}
	}
	return layers
}

// Limit returns the limit of a worker in a stage, which is zero if the plan has none.
func (p *Plan) Limit(stage int, id id.WorkerID) Limit {
	for _, l := range p.Limits {
		if l.Stage == stage && l.Worker == id {
			return l
		}
	}
	return Limit{Stage: stage, Worker: id}
}
