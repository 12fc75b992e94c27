package exact

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/trainer"
)

// spread is a run of several workers, from which follows what each of them
// has to do, hold and send.
type spread struct {
	plan      plan.Plan
	job       rundir.Job
	sizes     []int // of layers
	activity  int   // float32 of a boundary tensor for one sample
	dims      int   // of a boundary tensor
	moments   int
	evaluated int // samples of an evaluation
	evals     int // number of evaluations
}

// The sizes of what workers say in exchanges: in the commit, see record in
// package engine; of a micro-batch of an evaluation; of the hashes at the end, with their worker; in
// each, of blocks that were altered, and of each shard that is owned or mirrored.
const recordSize, lossSumSize, evalSize, hashes, altered, digest = 88, 32, 24, 68, 52, 4

// segment and incast are what package comm goes by where nothing is set.
const segment, incast = 256 << 10, 4

func algorithm(op group.Op, n, size int) group.Algorithm {
	return group.Choose(op, n, int64(size), segment, incast, group.Place{})
}

// allGather adds what each member sends to gather parts of these sizes.
func allGather(sent []int64, parts []int) {
	n, total := len(parts), 0
	for _, p := range parts {
		total += p
	}
	for r, p := range parts {
		if n > 1 && algorithm(group.OpAllGather, n, total) == group.Ring {
			sent[r] += int64(total - parts[(r+1)%n]) // ours and all that it passes on
		} else {
			sent[r] += int64((n - 1) * p)
		}
	}
}

// bytes returns how many bytes of messages each worker of the plan sends in the
// whole run.
func (s spread) bytes(t *testing.T) []int64 {
	t.Helper()
	p := &s.plan
	rank := make(map[id.WorkerID]int)
	for i, w := range p.Workers {
		rank[w.ID] = i
	}
	sent := make([]int64, len(p.Workers))
	send := func(from, to id.WorkerID, bytes int) {
		if from != to {
			sent[rank[from]] += int64(bytes)
		}
	}
	last := len(p.Stages) - 1
	exchange := func(said []int) {
		for i, w := range p.Workers {
			said[i] += altered
			for _, sh := range p.Shards {
				if sh.Holds(w.ID) { // of the parameters, and of all
					said[i] += 2 * digest
				} else if slices.Contains(p.Stages[p.StageOf(sh.Layer)].Workers, w.ID) {
					said[i] += digest
				}
			}
		}
		allGather(sent, said)
	}

	// The shape of what each layer makes goes from all who make it to everyone.
	for layer := range len(s.sizes) - 1 {
		for _, from := range p.Stages[p.StageOf(layer)].Workers {
			for _, to := range p.Workers {
				send(from, to.ID, 8*s.dims)
			}
		}
	}
	for step := 1; step <= s.job.Steps; step++ {
		for stage := range last {
			for m, from := range p.Route[stage] {
				to := p.Route[stage+1][m]
				send(from, to, 4*s.activity*s.job.MicroBatch)
				send(to, from, 4*s.activity*s.job.MicroBatch)
			}
		}
		shards := make([]int, len(s.sizes)) // of each layer, so far
		for _, sh := range p.Shards {
			stage := p.StageOf(sh.Layer)
			workers := p.Stages[stage].Workers
			size := 4 * (sh.Hi - sh.Lo)
			switch {
			case s.job.Reduction == "fast": // to each owner, from or through everyone else
				for _, w := range workers {
					send(w, sh.Owner, size)
				}
			default:
				nodes := make([][]tree.Node, len(workers))
				for i, w := range workers {
					nodes[i] = p.Nodes(stage, w, step)
				}
				tp, err := group.PlanTree(p.Micros(), nodes, slices.Index(workers, sh.Owner), shards[sh.Layer]%2)
				if err != nil {
					t.Fatal(err)
				}
				for _, m := range tp.Moves {
					send(workers[m.From], workers[m.To], size)
				}
			}
			shards[sh.Layer]++
			for _, w := range sh.Mirrors {
				send(sh.Owner, w, size) // the complete gradient
			}
			for _, w := range workers {
				if slices.Contains(sh.Mirrors, w) {
					continue // which makes the new parameters itself
				}
				send(sh.Owner, w, size) // new parameters
				if s.job.Zero == 1 {
					send(sh.Owner, w, size) // the complete gradient
				}
			}
		}
		records := make([]int, len(p.Workers))
		for i, w := range p.Workers {
			records[i] = recordSize + lossSumSize*len(p.Nodes(last, w.ID, step))
		}
		exchange(records)
	}

	// Evaluations: the workers of a stage take micro-batches in turn.
	losses := make([]int, len(p.Workers))
	for first, m := 0, 0; first < s.evaluated; first, m = first+s.job.MicroBatch, m+1 {
		worker := func(stage int) id.WorkerID {
			w := p.Stages[stage].Workers
			return w[m%len(w)]
		}
		for stage := range last {
			send(worker(stage), worker(stage+1), s.evals*(8*s.dims+4*s.activity*min(s.job.MicroBatch, s.evaluated-first)))
		}
		losses[rank[worker(last)]] += evalSize
	}
	for range s.evals {
		exchange(slices.Clone(losses))
	}

	// The end: parameters and moments to the first worker, and its hashes to all.
	for _, sh := range p.Shards {
		send(sh.Owner, p.Workers[0].ID, (1+s.moments)*4*(sh.Hi-sh.Lo))
	}
	said := make([]int, len(p.Workers))
	said[0] = hashes
	exchange(said)
	return sent
}

// What every worker did, held and sent is what follows from the plan: nothing
// is computed twice, held by others or sent for nothing.
func TestWorkersDoWhatThePlanSays(t *testing.T) {
	launcher, gpt := programs(t)
	const width, context = 64, 32
	program := append([]string{gpt}, strings.Fields(fmt.Sprintf("--layers 3 --width %d --heads 4 --context %d --global-batch 20 --micro-batch 2 --steps 3 --eval-every 2 --data %s", width, context, corpus))...)
	text, err := trainer.Text(corpus)
	if err != nil {
		t.Fatal(err)
	}
	_, held := text.HoldOut(20)
	for _, c := range []struct {
		workers, stages int
		more            []string
	}{
		{1, 1, nil}, {3, 1, nil}, {4, 2, nil}, {3, 2, []string{"--zero", "1"}}, {5, 3, nil}, {3, 2, []string{"--reduction", "fast"}},
	} {
		t.Run(fmt.Sprintf("%d workers, %d stages, %v", c.workers, c.stages, c.more), func(t *testing.T) {
			flags := append([]string{"--workers", fmt.Sprint(c.workers), "--stages", fmt.Sprint(c.stages), "--verify", "0", "--reshape", "off"}, c.more...)
			dir := filepath.Join(t.TempDir(), "run")
			sum, _ := launchIn(t, dir, launcher, append(flags, program...)...)
			s := spread{activity: width * context, dims: 3, moments: 2, evals: 2}
			read := func(name string, v any) {
				t.Helper()
				raw, err := os.ReadFile(filepath.Join(dir, name))
				if err == nil {
					err = json.Unmarshal(raw, v)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			read("job.json", &s.job)
			var line rundir.Plan
			raw, err := os.ReadFile(filepath.Join(dir, "plans.jsonl"))
			if n := bytes.Count(raw, []byte("\n")); n > 1 {
				events, _ := os.ReadFile(filepath.Join(dir, "events.jsonl"))
				t.Fatalf("%d plans, and no worker was lost or asked to leave:\n%s", n, events)
			}
			if err == nil {
				err = json.Unmarshal(bytes.TrimSpace(raw), &line)
			}
			if err == nil {
				s.plan, err = plan.Parse(line.Plan)
			}
			if err != nil {
				t.Fatal(err)
			}
			s.sizes = make([]int, s.plan.Layers())
			for _, sh := range s.plan.Shards {
				s.sizes[sh.Layer] = max(s.sizes[sh.Layer], sh.Hi)
			}
			s.evaluated = (int(held.Bytes()) - 1) / context
			if n := s.job.EvalSamples; n > 0 {
				s.evaluated = min(s.evaluated, n)
			}
			s.check(t, sum)
		})
	}
}

// check holds what the workers did against what they had to do.
func (s spread) check(t *testing.T, sum trainer.Summary) {
	t.Helper()
	if len(sum.Workers) != len(s.plan.Workers) {
		t.Fatalf("%d workers", len(sum.Workers))
	}
	sent := s.bytes(t)
	for i, w := range sum.Workers {
		id := s.plan.Workers[i].ID
		var passes, params, state int64
		var layers []int
		share, blocks := 0.0, 0
		for _, stage := range s.plan.StagesOf(id) {
			st := s.plan.Stages[stage]
			for _, x := range s.plan.Route[stage] {
				if x == id {
					passes += int64(s.job.Steps)
				}
			}
			whole := 0
			for l := st.Lo; l < st.Hi; l++ {
				layers = append(layers, l)
				whole += s.sizes[l]
			}
			params += int64(4 * whole)
			share += float64(whole) / float64(len(st.Workers))
			if len(st.Workers) > 1 {
				blocks += 1 // roundings do not add up over layers
			}
		}
		for _, sh := range s.plan.Shards {
			if sh.Owner != id && !slices.Contains(sh.Mirrors, id) {
				continue
			}
			state += int64(4 * s.moments * (sh.Hi - sh.Lo))
			if !slices.Contains(layers, sh.Layer) { // a mirror in another stage
				params += int64(4 * (sh.Hi - sh.Lo))
			}
		}
		if w.ID != int(id) || w.Forwards != passes || w.Backwards != passes {
			t.Errorf("worker %d: %d forwards and %d backwards, want %d of worker %d", w.ID, w.Forwards, w.Backwards, passes, id)
		}
		if !slices.Equal(w.Layers, layers) || w.ParamBytes != params {
			t.Errorf("worker %d held layers %v of %d bytes, want %v of %d", id, w.Layers, w.ParamBytes, layers, params)
		}
		const block = 4096
		near := float64(4 * s.moments * block * blocks)
		if w.StateBytes != state {
			t.Errorf("worker %d held %d bytes of optimizer state, want %d", id, w.StateBytes, state)
		}
		if d := float64(w.StateBytes) - 4*float64(s.moments)*share; s.plan.Mirrors == 0 && (d > near || -d > near) {
			t.Errorf("worker %d held %d bytes of optimizer state, and its share is %.0f give or take %.0f", id, w.StateBytes, 4*float64(s.moments)*share, near)
		}
		if w.BytesSent != sent[i] {
			t.Errorf("worker %d sent %d bytes, and the model says %d", id, w.BytesSent, sent[i])
		}
	}
}
