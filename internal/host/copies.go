package host

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/archiving"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/shards"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// Where each host has a run directory of its own (Config.Apart), the leader has the others keep copies of the records that it
// writes, and tells them what people are shown. A host that links says how far its copies go, and gets the rest. A copy is at most
// a heartbeat behind; what a new leader lacks of the steps it hears from the workers' hosts (control.Lead).

const (
	maxCopied = 1 << 20 // bytes of a record in one message
	maxMarks  = 16      // records of a host
	maxUnread = 1 << 12 // messages to a host above which it is shown no more
)

// audience are the hosts that are linked to a leadership, as far as they get copies.
type audience struct {
	over chan struct{} // closed when the run has ended

	mu    sync.Mutex
	links map[*queue[control.Message]]time.Time // when each was heard last
	kept  []keptMessage
	last  []byte
	ended bool
	left  bool
	gone  chan struct{} // closed when no link is left after the end
}

type keptMessage struct {
	name string
	m    control.Message
}

func newAudience() *audience {
	return &audience{over: make(chan struct{}), links: make(map[*queue[control.Message]]time.Time), gone: make(chan struct{})}
}

// tell tells all linked hosts something, and, with a name, those that link later, unless something else has the name by then.
func (a *audience) tell(keep string, m control.Message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if keep != "" {
		found := false
		for i := range a.kept {
			if a.kept[i].name == keep {
				a.kept[i].m, found = m, true
			}
		}
		if !found {
			a.kept = append(a.kept, keptMessage{keep, m})
		}
	}
	for q := range a.links {
		if keep != "" || q.len() < maxUnread {
			q.put(m)
		}
	}
}

func (a *audience) enter(q *queue[control.Message]) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range a.kept {
		q.put(k.m)
	}
	a.links[q] = time.Now()
}

// hear takes in that a host has said something.
func (a *audience) hear(q *queue[control.Message]) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.links[q]; ok {
		a.links[q] = time.Now()
	}
}

// silent reports whether no linked host has been heard for so long.
func (a *audience) silent(long time.Duration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, heard := range a.links {
		if time.Since(heard) < long {
			return false
		}
	}
	return true
}

func (a *audience) leave(q *queue[control.Message]) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.links, q)
	a.check()
}

// check says that no link is left after the end; a.mu is held.
func (a *audience) check() {
	if a.ended && len(a.links) == 0 && !a.left {
		a.left = true
		close(a.gone)
	}
}

// end tells all linked hosts that the run is over, once they have all copies, and waits until they have ended their links, or are
// silent for so long. A host that has not been told may need the vote of this one.
func (a *audience) end(last []byte, long time.Duration) {
	a.mu.Lock()
	a.last, a.ended = last, true
	close(a.over)
	a.check()
	a.mu.Unlock()
	tick := time.NewTicker(timing.HostHeartbeat)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < timing.Drain; {
		select {
		case <-a.gone:
			return
		case <-tick.C:
			if a.silent(long) {
				return
			}
		}
	}
}

// attend sends copies and beats to a host until ctx ends. records are those that the host has.
func (l *lead) attend(ctx context.Context, q *queue[control.Message], records []rundir.Mark) {
	tick := time.NewTicker(timing.HostHeartbeat)
	defer tick.Stop()
	var copier *rundir.Copier
	if l.c.Apart {
		copier = l.c.RunDir.Copier(records)
		l.told.enter(q)
		defer l.told.leave(q)
	}
	for {
		if q.empty() && copier != nil {
			copyTo(q, copier)
		}
		if q.empty() {
			q.put(control.Beat{Crowd: l.relay.crowded()})
		}
		select {
		case <-tick.C:
		case <-l.told.over:
			if copier == nil {
				<-ctx.Done()
				return
			}
			for copyTo(q, copier) {
			}
			q.put(control.Shown{Data: l.told.last})
			<-ctx.Done()
			return
		case <-ctx.Done():
			return
		}
	}
}

// copyTo sends a part of each record that has more, and reports whether there was any.
func copyTo(q *queue[control.Message], c *rundir.Copier) bool {
	parts, _ := c.Next(maxCopied) // what cannot be read now is tried again
	for _, p := range parts {
		q.put(control.Copy(p))
	}
	return len(parts) > 0
}

// copies are those that a host keeps.
type copies struct {
	dir   string
	own   *rundir.Dir // the same
	waits func(string)

	mu     sync.Mutex
	term   uint64    // this host has led in: copies of older terms come too late
	failed string    // the record of which a part was not kept
	again  time.Time // when that was, or the directory was made again
}

// keep keeps a part of a record that the leader of a term has sent. It reports false where all records have to be sent again, over a new link.
func (k *copies) keep(term uint64, p rundir.Part) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if term <= k.term || k.failed != "" && time.Since(k.again) < timing.Disk {
		return true
	}
	err := rundir.Keep(k.dir, p)
	if err == nil && k.failed != "" {
		err = rundir.Takes(k.dir, k.failed)
	}
	switch {
	case err == nil:
		return k.failed == "" // other parts were not kept
	case rundir.Again(k.dir, err):
		if time.Since(k.again) < timing.Disk {
			return true // perhaps it is still being removed; what comes after that second fails like this, too
		}
		k.again = time.Now()
		if k.waits != nil && k.failed == "" {
			k.waits("records were removed from the run directory: they are copied again")
		}
		return false
	}
	// Training does not depend on it, and the next second may be better.
	if k.waits != nil && k.failed == "" {
		k.waits("copies of the leader's records are not kept until the run directory takes them: " + session.OneLine(err.Error()))
	}
	if k.failed == "" {
		k.failed = p.Name
	}
	k.again = time.Now()
	return true
}

// alive keeps how the leader of a term has said that processes can be reached.
func (k *copies) alive(term uint64, w rundir.Workers) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if term > k.term {
		_ = k.own.WriteWorkers(w) // the next one
	}
}

// marks returns how far the copies go, for a new link.
func (k *copies) marks() []rundir.Mark {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.failed = ""
	marks, _ := rundir.Marks(k.dir) // what cannot be read is copied again
	return marks
}

// takeOver makes the copies the records of this host, which leads. job is the job that was agreed.
func (k *copies) takeOver(term uint64, job []byte) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.term = term
	return rundir.Inherit(k.dir, job)
}

// saveShards begins to make a checkpoint whole.
func (r *run) saveShards(e session.CommitCheckpoint) {
	writers := make([]int, len(e.Writers))
	for i, place := range e.Writers {
		writers[i] = r.hosts.members[place].host
	}
	s, send := shards.NewSave(r.nextAsked(), e.Manifest, writers, r.hosts.having(func(h *hostState) bool { return h.out != nil }), r.c.Self, r.copies())
	r.save, r.protect = s, nil // a newer one takes the place of what was to be protected
	r.tellHosts(send)
	r.endShards()
}

// gatherShards begins to look for the checkpoint that a plan begins from. Hosts without a link are waited for until they are lost.
func (r *run) gatherShards(e session.VerifyCheckpoint) {
	g, send := shards.NewGather(r.nextAsked(), e.Of, e.Propose.Order.Passed.Step, r.hosts.having(func(h *hostState) bool { return !h.lost }))
	r.gather, r.gathers, r.protect = g, e, nil
	r.tellHosts(send)
}

// protectShards begins to have the newest checkpoint copied again once hosts have come or gone, and none of those that are left is
// without a link. Where that fails, it is tried again with the next change; the next checkpoint has all its copies anyway.
func (r *run) protectShards() {
	of, newest := r.s.Saved()
	if !r.c.Apart || newest == 0 || r.save != nil || r.gather != nil || r.protect != nil {
		return
	}
	links := make(map[int]outbox)
	for i := range r.hosts.hosts {
		if h := &r.hosts.hosts[i]; h.out != nil {
			links[i] = h.out
		} else if !h.lost {
			return
		}
	}
	if maps.Equal(links, r.guarded) {
		return
	}
	r.guarded = links
	p, send := shards.NewProtect(r.nextAsked(), of, newest, r.hosts.having(func(h *hostState) bool { return h.out != nil }), r.copies())
	r.protect = p
	r.tellHosts(send)
}

// copies returns on how many hosts each file of a checkpoint is to be.
func (r *run) copies() int { return 1 + max(r.c.Mirrors, 1) }

// dropShards has all hosts remove what they have of checkpoints that could not be made.
func (r *run) dropShards(step int) {
	for i := range r.hosts.hosts {
		r.tellHosts([]shards.Send{{Host: i, Message: control.Drop{Step: step}}})
	}
}

// nextAsked returns the first of the identities of what hosts are asked for one checkpoint, which no other leader has.
func (r *run) nextAsked() uint64 {
	const each = 1 << 10 // questions
	r.asked += each
	return r.lead.term<<32 + r.asked
}

// tellHosts sends to hosts that have a link.
func (r *run) tellHosts(send []shards.Send) {
	for _, m := range send {
		if out := r.hosts.hosts[m.Host].out; out != nil {
			out.put(m.Message)
		}
	}
}

// heardOfShards takes in what a host says of checkpoints.
func (r *run) heardOfShards(e hostSaid) {
	name := r.hosts.addrs[e.host].Name
	switch m := e.m.(type) {
	case control.Surveyed:
		if r.gather != nil {
			r.tellHosts(r.gather.Surveyed(e.host, name, m))
		}
		if r.protect != nil {
			r.tellHosts(r.protect.Surveyed(e.host, name, m))
		}
	case control.Kept:
		if r.gather != nil {
			r.tellHosts(r.gather.Kept(e.host, name, m))
		}
		if r.save != nil {
			r.tellHosts(r.save.Kept(e.host, name, m))
		}
		if r.protect != nil {
			r.tellHosts(r.protect.Kept(e.host, name, m))
		}
	default:
		return
	}
	r.endShards()
}

// lookAtShards waits no longer for hosts that are gone.
func (r *run) lookAtShards() {
	for i := range r.hosts.hosts {
		h := &r.hosts.hosts[i]
		if r.save != nil && h.out == nil {
			r.tellHosts(r.save.Lost(i, r.hosts.addrs[i].Name))
		}
		if r.gather != nil && h.lost {
			r.tellHosts(r.gather.Lost(i))
		}
		if r.protect != nil && h.out == nil {
			r.protect.Lost(i, r.hosts.addrs[i].Name)
		}
	}
	r.endShards()
	r.protectShards()
}

// endShards tells the session what has come of it.
func (r *run) endShards() {
	if s := r.save; s != nil {
		if over, err := s.Over(); over {
			r.save = nil
			r.events.put(session.CheckpointCommitted{Step: s.Step(), Err: err})
			r.events.put(session.CheckpointsPruned{})
		}
	}
	if p := r.protect; p != nil {
		if over, err := p.Over(); over {
			r.protect = nil
			switch step, files := p.Copied(); {
			case err != nil:
				r.events.put(session.Noted{Text: fmt.Sprintf("files of the newest checkpoint may lack copies: %s", session.OneLine(err.Error()))})
			case files > 0:
				r.events.put(session.Noted{Text: fmt.Sprintf("the checkpoint of step %d has all its copies again: %s copied", step, plan.Count(files, "file"))})
			}
		}
	}
	if g := r.gather; g != nil && g.Over() {
		r.gather = nil
		v := session.CheckpointVerified{Propose: r.gathers.Propose}
		v.Step, v.Refused = g.Found()
		r.events.put(v)
	}
}

// having returns the hosts of which something holds.
func (r *roster) having(is func(*hostState) bool) (all []shards.Host) {
	for i := range r.hosts {
		if is(&r.hosts[i]) {
			all = append(all, shards.Host{Place: i, Name: r.addrs[i].Name})
		}
	}
	return all
}

// keepShards does what the leader wants of this host's checkpoints; r.mu is held.
func (r *relay) keepShards(m control.Message) {
	if r.shards == nil {
		return
	}
	ctx := r.ctx
	r.working.Go(func() {
		var answer control.Message
		switch m := m.(type) {
		case control.Survey:
			answer = r.shards.Survey(m)
		case control.Keep:
			answer = r.shards.Keep(ctx, m)
		case control.Drop:
			r.shards.Drop(ctx, m)
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.tell(answer)
	})
}

// dialHost connects to another host by its name.
func (r *relay) dialHost(ctx context.Context, name string) (*control.Conn, error) {
	host := r.c.host(name)
	if host < 0 {
		return nil, fmt.Errorf("there is no host %q", name)
	}
	return r.c.dial(ctx, host, r.tls)
}

// opened reports whether all workers of this host have opened their data.
func (r *relay) opened() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !slices.ContainsFunc(r.locals, func(l *local) bool { return l.next == nil && l.ready == nil && l.exit == nil })
}

// openArchive returns what copies the checkpoints of this run.
func (r *run) openArchive() *archiving.Copier {
	var to *archive.Archive // of the goroutine
	dir, keep, owner := r.dir.Path(), r.c.Keep, archiveOwner(r.c.Secret)
	return archiving.New(func(ctx context.Context, e session.ArchiveCheckpoint) error {
		if to == nil {
			to = archive.New(r.c.Target, archive.Claim{Owner: owner, After: e.From, Job: e.Job, Data: e.Data, FirstFile: filepath.Join(dir, rundir.FirstValues)})
			if r.c.Apart {
				to.Others = r.archivers()
			}
		}
		if e.Step == 0 {
			return to.Own(ctx)
		}
		return to.Save(ctx, dir, e.Step, keep)
	}, r.post)
}

// archivers are the hosts that have files of checkpoints, and copy these to the target.
func (r *run) archivers() *archive.Others {
	uploads := &archiving.Uploads{Dial: r.lead.relay.dialHost, Note: func(text string) { r.post(session.Noted{Text: text}) }}
	return &archive.Others{Self: r.c.self().Name, Put: uploads.Put, Fetch: r.bringHere}
}

// bringHere gets files of a checkpoint that are on other hosts.
func (r *run) bringHere(ctx context.Context, m *checkpoint.Manifest, files []int) error {
	keep := control.Keep{}
	var err error
	if keep.Manifest, err = m.Encode(); err != nil {
		return err
	}
	for _, i := range files {
		keep.Files = append(keep.Files, control.Wanted{File: i, From: m.Files[i].Hosts})
	}
	if kept := r.lead.relay.shards.Keep(ctx, keep); kept.Err != "" {
		return errors.New(kept.Err)
	}
	return nil
}

// archiveOwner names this start of a run, the same on all its hosts.
func archiveOwner(secret []byte) string {
	if len(secret) > 0 {
		sum := sha256.Sum256(append([]byte("archive "), secret...))
		return hex.EncodeToString(sum[:16])
	}
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	return hex.EncodeToString(b[:])
}
