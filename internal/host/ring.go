package host

import (
	"cmp"
	"context"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/plan"
)

// The workers of a run and its agents are members of a gossip ring, who probe each other. What
// the ring says of a worker is evidence beside that of its agent, which hears it beat and reaps it.

// ringKeySize is that of AES-128.
const ringKeySize = 16

// ringMember is this agent's membership.
type ringMember struct {
	ring  *gossip.Ring
	c     control.Ring // for workers
	tasks sync.WaitGroup
	end   context.CancelFunc
	ctx   context.Context
	news  chan struct{} // holds one token if there may be something new

	seed string // whom we joined last; of join, which is called by one at a time

	mu sync.Mutex
	by map[plan.WorkerID]string // name of the member that spoke ill of a worker last
}

// ringShare is by how much the ring takes longer than the run to be sure of a loss. Its members share
// the processor with training, and only the first sign is waited for, which comes much sooner.
const ringShare = 2

// openGossip makes the ring of a run, or a member that joins it by what a worker of this host is
// told. host and addr are those of this agent, size how many members are expected. Where there
// are several hosts the key follows from their secret, else it is drawn.
func openGossip(job, host, addr string, secret []byte, detect time.Duration, size int) (*ringMember, error) {
	key := make([]byte, ringKeySize)
	if len(secret) == 0 {
		_, _ = rand.Read(key) // it never fails
	} else {
		var err error
		if key, err = hkdf.Key(sha256.New, secret, []byte(job), "soliton ring, version 1", ringKeySize); err != nil {
			return nil, err
		}
	}
	detect *= ringShare
	size = min(max(size, 2), gossip.MaxMembers)
	r, err := gossip.Open(gossip.Config{
		Self:   gossip.Identity{Kind: gossip.Agent, Host: cmp.Or(host, gossip.LocalHost), Addr: addr},
		Listen: gossip.BesideOf(addr), Job: job, SecretKey: key, Detect: detect, Members: size,
	})
	if err != nil {
		return nil, err
	}
	g := &ringMember{
		ring: r, c: control.Ring{Job: job, Key: key, Seeds: []string{r.Addr()}, Detect: detect, Size: size},
		news: make(chan struct{}, 1), by: make(map[plan.WorkerID]string),
	}
	g.ctx, g.end = context.WithCancel(context.Background())
	g.tasks.Go(g.listen)
	return g, nil
}

// close ends the membership.
func (g *ringMember) close() {
	g.end()
	g.ring.Close()
	g.tasks.Wait()
}

// join makes one ring of ours and that of another agent, in the background. A nil gossip
// joins nobody.
func (g *ringMember) join(seeds []string) {
	if g == nil || len(seeds) == 0 || seeds[0] == g.ring.Addr() || seeds[0] == g.seed {
		return
	}
	g.seed = seeds[0]
	g.tasks.Go(func() {
		for g.ring.Join(g.ctx, seeds...) != nil {
			select {
			case <-time.After(g.c.Detect):
			case <-g.ctx.Done():
				return
			}
		}
	})
}

// listen takes note that there is news, and of whose it is.
func (g *ringMember) listen() {
	for e := range g.ring.Events() {
		if e.Member.Kind == gossip.Worker {
			g.mu.Lock()
			if e.By != "" {
				g.by[e.Member.Worker] = e.By
			}
			if len(g.by) > gossip.MaxMembers {
				clear(g.by)
			}
			g.mu.Unlock()
		}
		select {
		case g.news <- struct{}{}:
		default:
		}
	}
}

// tell hands on what the ring believes of each worker, and then each change, until ctx ends.
func (g *ringMember) tell(ctx context.Context, post func(event) bool) {
	type life struct {
		incarnation int
		state       gossip.State
	}
	var told map[plan.WorkerID]life
	for {
		members := g.ring.Members()
		all := make(map[plan.WorkerID]life)
		for _, m := range members {
			if m.Kind != gossip.Worker {
				continue
			}
			is := life{m.Incarnation, m.State}
			all[m.Worker] = is
			if was, ok := told[m.Worker]; ok && was == is {
				continue
			}
			e := gossiped{who: plan.Worker{ID: m.Worker, Incarnation: m.Incarnation}, state: m.State}
			if m.State == gossip.StateSuspect || m.State == gossip.StateDead {
				e.by = g.accuser(m.Worker, members)
			}
			if !post(e) {
				return
			}
		}
		told = all
		select {
		case <-g.news:
		case <-ctx.Done():
			return
		}
	}
}

// accuser says in words who cannot reach a worker.
func (g *ringMember) accuser(id plan.WorkerID, members []gossip.Member) string {
	g.mu.Lock()
	by := g.by[id]
	g.mu.Unlock()
	for _, m := range members {
		switch {
		case m.Name() != by:
		case m.Kind == gossip.Worker:
			return fmt.Sprintf("worker %d", m.Worker)
		case m.Host == gossip.LocalHost:
			return "the agent"
		default:
			return "the agent of " + m.Host
		}
	}
	return "the ring"
}

// gossiped is what the ring believes of a worker.
type gossiped struct {
	who   plan.Worker
	state gossip.State
	by    string // who cannot reach it, in words, where it is suspected or called dead
}

// standing is a worker's in the ring.
type standing struct {
	known     bool // it was a member once
	state     gossip.State
	suspected time.Time // since when; zero: it is not, or that does not count
	by        string    // who cannot reach it
	told      bool      // that the ring and its agent differ
}

// String is what people are told of it.
func (s standing) String() string {
	if !s.known {
		return ""
	}
	return s.state.String()
}

// gossiped takes in what the ring believes of a worker. That decides nothing by itself: watch
// and the controller weigh it.
func (s *session) gossiped(now time.Time, e gossiped) []effect {
	id := s.find(e.who)
	if id < 0 || s.judged {
		return nil
	}
	w := &s.workers[id]
	if w.gone || w.exited {
		return nil
	}
	by := w.ring.by
	w.ring.known, w.ring.state = true, e.state
	switch {
	case e.by == "":
		w.ring.suspected, w.ring.by = time.Time{}, ""
	case by == "":
		w.ring.suspected, w.ring.by = now, e.by
	}
	var effects []effect
	if w.ring.by != by {
		effects = s.tell(now, controller.Suspected{Worker: w.who, By: w.ring.by})
	}
	if s.formed() {
		effects = append(effects, s.processes())
	}
	if e.state == gossip.StateDead && w.state == training && w.doom == nil && !w.ring.told && now.Sub(w.heard) < 2*control.BeatEvery {
		w.ring.told = true
		effects = append(effects, s.about(now, id, "note", fmt.Sprintf("the ring takes worker %d for dead, since %s cannot reach it; its agent hears it, and it stays", s.id(id), e.by)))
	}
	return effects
}

// formed reports whether all workers of the run have been members at once.
func (s *session) formed() bool {
	s.ringFormed = s.ringFormed || len(s.outside()) == 0
	return s.ringFormed
}

// outside returns the workers of the run that have never been members.
func (s *session) outside() (all []int) {
	for id := range s.workers {
		if w := &s.workers[id]; !w.ring.known && !w.gone && !w.exited && !w.joins {
			all = append(all, s.id(id))
		}
	}
	return all
}

// deaf forgets suspicions: an agent that was held up itself cannot tell them from its own pause.
func (s *session) deaf(now time.Time) (effects []effect) {
	for id := range s.workers {
		if w := &s.workers[id]; w.ring.by != "" {
			w.ring.suspected, w.ring.by = time.Time{}, ""
			effects = append(effects, s.tell(now, controller.Suspected{Worker: w.who})...)
		}
	}
	return effects
}

// bears returns how long a worker may be silent. One that the others of the ring have tried to
// reach in vain for a quarter of the budget, all of it since it was heard last, has
// used up the doubt that is in the rest: two ways lead to it, and it answers on neither. Below
// some beats, nothing is made of that: a process that waits for a processor is slow on both ways.
func (s *session) bears(w *worker, now time.Time) time.Duration {
	limit := s.cfg.silence()
	if s.state < training {
		// Reading data and starting processes may take a machine's whole attention,
		// and nothing is lost yet by patience.
		return limit * startPatience
	}
	if at := w.ring.suspected; !at.IsZero() && at.After(w.heard) && now.Sub(at) > s.cfg.Detect/4 {
		limit = min(limit, max(s.cfg.Detect/2, suspectBeats*control.BeatEvery))
	}
	return limit
}

// suspectBeats is how many beats a suspected worker may leave out at least.
const suspectBeats = 5

// ringPatience is how long the ring may take to form, in budgets, before that is told.
const ringPatience = 10

// formBy returns until when the ring is to have formed, zero where there is none.
func (s *session) formBy(now time.Time) (by time.Time) {
	if len(s.gossip.Seeds) > 0 {
		by = now.Add(ringPatience * s.cfg.Detect)
	}
	return by
}

// missing notes, once, who is not in the ring although it had time enough to form.
func (s *session) missing(now time.Time) []effect {
	if s.ringDue.IsZero() || now.Before(s.ringDue) || s.judged || s.state != training {
		return nil
	}
	s.ringDue = time.Time{}
	out := s.outside()
	if len(out) == 0 {
		return nil
	}
	return []effect{s.event(now, "note", fmt.Sprintf("not in the gossip ring: %v; what becomes of these workers their agents alone say", out))}
}

// ringOf is what a worker is told of the ring.
func (s *session) ringOf(w *worker) control.Ring {
	r := s.gossip
	r.Host = w.who.Host
	return r
}

// enterRing makes the ring of a run on one host, unless there is nobody to be in it, and listens
// to it, until the returned function is called. Where it cannot be made the run does without.
func (r *run) enterRing() (leave func()) {
	leave = func() {}
	if r.gossip == nil {
		if r.cfg.Detect == 0 || r.s.noRing != "" || r.lone && r.cfg.Start == nil {
			return leave
		}
		g, err := openGossip(rand.Text(), "", "", nil, r.cfg.Detect, len(r.workers)+1)
		if err != nil {
			r.s.noRing = noRing(err)
			return leave
		}
		r.gossip, leave = g, g.close
	}
	r.s.gossip = r.gossip.c
	r.others.Go(func() { r.gossip.tell(r.talking, r.post) })
	return leave
}

func noRing(err error) string {
	return fmt.Sprintf("there is no gossip ring: %s", oneLine(err.Error()))
}

// openHostRing makes the member of one of several hosts, nil if there is to be no ring. Their
// agents find each other by the Start that a leader sends to their workers.
func openHostRing(c *HostConfig) (*ringMember, error) {
	if c.Run.Detect == 0 {
		return nil, nil
	}
	sum := sha256.Sum256([]byte(c.RunDir))
	self := c.Hosts[c.Self]
	return openGossip(hex.EncodeToString(sum[:8]), self.Name, self.Link, c.Secret, c.Run.Detect, c.workers()+len(c.Hosts))
}
