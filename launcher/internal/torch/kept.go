package torch

import (
	"slices"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// kept are the gradients of a stage's passes that the Python process has on its device, as sums over nodes of the tree, so that they are
// copied from there once a step. A sum is in the slot with the number of its first micro-batch.
type kept struct {
	passes []*pass         // in the order of their backward passes, with what it takes to compute them again
	sums   *tree.Sums[int] // slots; nil for none
	merges []int           // pairs of slots that the newest pass has to be added
	on     *connection     // to the process that has them
}

// keeps reports whether the gradients of a micro-batch are kept: on a device, but for those that a witness wants to see.
func (s *stage) keeps(m engine.Micro) bool {
	return s.program.job.Identity.Device != "" && m.Made == nil
}

// keep takes a pass into the sums, and notes which slots are added to which when its gradients are there.
func (s *stage) keep(f *pass) {
	k := &s.kept
	if k.sums == nil {
		k.sums = tree.NewSums(f.micro.Of, func(left, right int) int {
			k.merges = append(k.merges, left, right)
			return left
		})
	}
	k.merges = nil
	if dropped := k.sums.Put(tree.Leaf(f.micro.Index), f.micro.Index); len(dropped) > 0 {
		panic("torch: a stage computes a micro-batch a second time")
	}
	f.merges = k.merges
	k.passes = append(k.passes, f)
}

// shed gives back the memory of a kept pass that it does not take to compute it again.
func (p *Program) shed(f *pass) {
	p.memory.give(f.out)
	f.out = block{}
}

// restore computes kept passes again if it is another process than before.
func (s *stage) restore(c *connection, passes []*pass) error {
	if s.kept.on == c {
		return nil
	}
	for _, f := range passes {
		if err := f.again(c); err != nil {
			return err
		}
		layers := s.layers()
		slices.Reverse(layers)
		again := func(c *connection, layer int) error { return f.sendBackward(c, layer, 0, 0) }
		if err := s.each(c, control.CallBackward, again, layers); err != nil {
			return err
		}
	}
	s.kept.on = c
	return nil
}

// landings returns where the sums of each layer are to be written.
func (s *stage) landings(grads engine.Gradients) [][]landing {
	all := make([][]landing, s.hi)
	if s.kept.sums == nil {
		return all
	}
	for i := s.lo; i < s.hi; i++ {
		for _, n := range s.kept.sums.Nodes() {
			l := s.program.land(grads.Buffer(i))
			l.of = n
			all[i] = append(all[i], l)
		}
	}
	return all
}

func (s *stage) sendHandOver(c *connection, layer int, sums []landing) error {
	for _, l := range sums {
		if err := c.send(askHandOver, layer, l.of.Lo, l.at); err != nil {
			return err
		}
	}
	return nil
}

// awaitHandOver receives the replies to sendHandOver.
func (s *stage) awaitHandOver(c *connection, layer int, sums []landing) error {
	for range sums {
		if _, _, err := s.await(c, control.CallBackward, layer); err != nil {
			return err
		}
	}
	return nil
}

// HandOver implements [engine.Stage].
func (s *stage) HandOver(grads engine.Gradients) {
	p, sums := s.program, s.landings(grads)
	left := s.hi // layers from here on are handed over
	must(p.run(func(c *connection) error {
		if err := s.restore(c, s.kept.passes); err != nil {
			return err
		}
		for i := left - 1; i >= s.lo; i-- {
			if err := s.sendHandOver(c, i, sums[i]); err != nil {
				return err
			}
			if err := s.awaitHandOver(c, i, sums[i]); err != nil {
				return err
			}
			left = i
			for _, l := range sums[i] {
				grads.Sum(i, l.of, p.settle(l))
			}
		}
		return nil
	}))
	s.Forget()
}

// Forget implements [engine.Stage].
func (s *stage) Forget() {
	p, k := s.program, s.kept
	if k.sums == nil {
		return
	}
	s.kept = kept{on: k.on}
	for _, f := range slices.Backward(k.passes) {
		p.end(f)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.computer != nil && k.on == p.computer {
		if err := k.on.send(askForget, s.lo, s.hi); err != nil {
			p.endComputer()
		}
	}
}
