package host

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/devices"
	"github.com/soliton-train/soliton/internal/host/ring"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/shards"
	"github.com/soliton-train/soliton/internal/host/spawn"
	"github.com/soliton-train/soliton/internal/host/supply"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/reach"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// goneHost is when a host that led was found to be gone, and how.
type goneHost struct {
	at    time.Time
	found reach.Finding
}

// relay stands between the workers of a host and the leader, on this host or another one. It is the only
// partner of its workers, and remembers what a new leader has to know of them.
type relay struct {
	c    *Config
	tls  *tls.Config
	news chan struct{} // the leadership has changed

	elections elections
	copies    *copies         // nil unless hosts are apart
	commands  *commands       // the same
	shards    *shards.Store   // the same
	supply    *supply.Store   // the same
	clocks    *devices.Holder // nil where none are to be set
	setClocks *devices.Server // of them, for leaders on other hosts; nil where there are none
	gossip    *ring.Member    // nil where there is no ring
	noRing    error           // why there is none, where there should be
	server    string          // of this host in the agreement
	stranded  chan error      // the run can never continue here

	stood time.Time // when this node stood for election last; of run

	mu         sync.Mutex
	ctx        context.Context // of run
	locals     []*local
	leader     agree.Leadership
	end        context.CancelFunc  // of the attempt to follow the leader of the moment
	term       uint64              // of that leader
	here       *lead               // the leader, if it is on this host
	out        outbox              // to the leader; nil while there is no link
	heard      time.Time           // when the leader said something last
	broke      map[int]time.Time   // when the link to a host that led has ended
	missed     map[int]bool        // the host was silent for too long then
	gone       map[int]goneHost    // the hosts that led and were found to be gone
	crowd      timing.Crowd        // of this machine
	crowdThere timing.Crowd        // of the leader's machine, as it said last
	leaving    bool                // the workers of this host are asked to leave
	departs    bool                // they have left, and this host gives back its vote
	left       chan struct{}       // closed when it has
	asks       asks                // of the leader
	stops      []session.StopAsked // that no leader has heard
	watches    bool                // timelines are wanted here
	program    program             // of workers
	working    sync.WaitGroup
}

// local is a worker of this host.
type local struct {
	who    id.Session
	worker spawn.Worker
	to     *queue[control.Message]

	// What a new leader is told.
	hello, note, ready, saved, delivered, done, failed, leave control.Message
	steps                                                     []control.Step
	halted                                                    time.Time // since when its process is stopped, as was told; zero: it is not
	frozen                                                    bool      // by no signal
	pulse                                                     *pulse    // of its process
	closed                                                    bool
	err                                                       error // why
	exit                                                      *control.Exited

	// What a worker hears once.
	started, stopped, released bool

	unwanted bool   // it is to be killed as soon as it is started
	next     *local // the session of its process from the next Hello on; nil unless it was fenced
}

// maxReported bounds the steps that are kept of each worker. Without a leader workers
// do not commit for longer than the failure-detection timeout.
const maxReported = 1 << 14

func newRelay(c *Config, t *tls.Config, e elections) *relay {
	r := &relay{c: c, tls: t, elections: e, news: make(chan struct{}, 1), broke: make(map[int]time.Time), missed: make(map[int]bool), gone: make(map[int]goneHost), left: make(chan struct{}), stranded: make(chan error, 1)}
	if s, ok := e.(servers); ok {
		r.server = s.ID()
	}
	if c.Clocks != nil {
		r.openClocks()
	}
	if c.Apart {
		r.copies = &copies{dir: c.RunDir.Path(), own: c.RunDir, waits: c.Waits}
		r.shards = &shards.Store{Dir: c.RunDir.Path(), Self: c.self().Name, Rule: c.Keep, Dial: r.dialHost}
		r.supply = supply.New(supply.Config{Self: c.self().Name, Hosts: c.hostNames, Dial: r.dialHost, Opened: r.opened})
	}
	return r
}

func newLocal(who id.Session) *local {
	return &local{who: who, to: newQueue[control.Message](), pulse: &pulse{}}
}

// begin starts the first workers, as long as stopped returns no error.
func (r *relay) begin(stopped func() error) (err error) {
	if r.c.Enters != nil {
		return nil // the leader says when
	}
	for _, n := range r.c.self().Workers {
		if err := stopped(); err != nil {
			return err
		}
		l := newLocal(id.Session{Worker: id.WorkerID(n)})
		if l.worker, err = r.c.Start(n, 0); err != nil {
			return &StartError{err}
		}
		r.locals = append(r.locals, l)
	}
	return nil
}

// killAll ends all workers, after run.
func (r *relay) killAll() {
	for _, l := range r.locals {
		if l.worker != nil {
			l.worker.Kill()
		}
	}
	for _, l := range r.locals {
		if l.worker != nil {
			spawn.End(l.worker)
		}
	}
}

// join starts a worker that joins; r.mu is held. It runs in a goroutine of its own, as starting
// takes time; of one that cannot be started the leader hears its end alone.
func (r *relay) join(who id.Session) {
	l := r.find(who)
	if l != nil && r.out != nil { // another leader wanted it, too; it may have exited before this one knew of it
		l.sayEnd(r.out)
	}
	if l != nil || len(r.locals) >= session.MaxWorkers {
		return
	}
	l = newLocal(who)
	r.locals = append(r.locals, l)
	// Before training began, workers have nothing to leave yet: one in the place of another takes its part, and leaves then.
	if r.departs || r.leaving && slices.ContainsFunc(r.locals, func(l *local) bool { return l.started }) {
		r.notStarted(l, -1, errors.New("its host leaves the run")) // no fault of the program
		return
	}
	r.working.Go(func() {
		w, err := r.c.Start(int(who.Worker), who.Incarnation)
		r.mu.Lock()
		defer r.mu.Unlock()
		if err != nil {
			r.notStarted(l, 1, err)
			return
		}
		if l.worker = w; l.unwanted {
			w.Kill()
		}
		r.attend(l)
	})
}

func (r *relay) notStarted(l *local, code int, err error) {
	r.hungUp(l, err)
	r.exited(l, control.Exited{Code: code, Text: "cannot be started: " + session.OneLine(err.Error())})
}

// attend serves a worker until run ends; r.mu is held.
func (r *relay) attend(l *local) {
	ctx := r.ctx
	w := l.worker
	r.working.Go(func() { r.listen(ctx, l, w) })
	r.working.Go(func() { r.awaitExit(ctx, l, w) })
}

// fence ends the session of a worker, and reports from now on what its process says and how it exits as another one; r.mu is held.
func (r *relay) fence(f control.Fence) {
	l := r.find(id.Session{Worker: id.WorkerID(f.Worker), Incarnation: f.Incarnation})
	if l == nil || l.worker == nil {
		return
	}
	next := newLocal(id.Session{Worker: l.who.Worker, Incarnation: f.Next})
	next.worker, next.to, next.halted, next.frozen, next.pulse = l.worker, l.to, l.halted, l.frozen, l.pulse
	r.locals = append(r.locals, next)
	l.next, l.worker = next, nil
	if l.closed {
		r.hungUp(next, l.err)
	}
	if l.exit != nil {
		r.exited(next, *l.exit)
	} else {
		l.exit = &control.Exited{Worker: f.Worker, Incarnation: f.Incarnation, Code: -1, Text: "it missed heartbeats and was fenced"}
	}
	l.closed = true // for another leader
	next.to.put(f)
}

// hungUp takes in that the connection of a worker has ended; r.mu is held.
func (r *relay) hungUp(l *local, err error) {
	l.closed, l.err = true, err
	r.tell(closedOf(l.who, err))
}

// exited takes in how the process of a worker has exited; r.mu is held.
func (r *relay) exited(l *local, e control.Exited) {
	e.Worker, e.Incarnation = int(l.who.Worker), l.who.Incarnation
	l.exit = &e
	r.tell(e)
	r.depart()
}

// leave asks the workers of this host to leave the run, as soon as they have a part in it.
func (r *relay) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leaving = true
	for _, l := range r.locals {
		if l.started && l.worker != nil {
			l.worker.Leave()
		}
	}
	r.depart()
}

// depart asks the leader to take back the vote of this host once its workers have left; r.mu is held. At the end of the run they
// exit as well, and the leader says how it has ended.
func (r *relay) depart() {
	if !r.leaving || r.departs || slices.ContainsFunc(r.locals, func(l *local) bool { return l.exit == nil || l.done != nil }) {
		return
	}
	r.departs = true
	r.tell(control.Leave{})
}

// hasLeft reports whether all workers of this host have left the run, so that it has no part in the end.
func (r *relay) hasLeft() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.departs
}

// newest returns the last session of a worker's process.
func (l *local) newest() *local {
	for l.next != nil {
		l = l.next
	}
	return l
}

func (r *relay) find(who id.Session) *local {
	i := slices.IndexFunc(r.locals, func(l *local) bool { return l.who == who })
	if i < 0 {
		return nil
	}
	return r.locals[i]
}

// listen takes in what a worker says.
func (r *relay) listen(ctx context.Context, l *local, w spawn.Worker) {
	conn := control.New(w.Conn())
	sent := make(chan struct{})
	talk, cancel := context.WithCancel(ctx)
	to := l.to // of all sessions of the process
	go func() {
		defer close(sent)
		for {
			m, ok := to.take(talk)
			if !ok || conn.Send(m) != nil {
				return // the receiver sees the reason
			}
		}
	}()
	var err error
	for {
		var m control.Message
		if m, err = conn.Receive(ctx); err != nil {
			break
		}
		l = r.said(l, m)
	}
	cancel()
	_ = conn.Close()
	<-sent
	if ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hungUp(l.newest(), err)
}

// said takes in a message of a worker, and returns the session of which it and those after it are.
func (r *relay) said(l *local, m control.Message) *local {
	r.mu.Lock()
	hello, ok := m.(control.Hello)
	if ok && l.next != nil && hello.Incarnation == l.next.who.Incarnation {
		l = l.next
	}
	if ok {
		l.pulse.pid = hello.PID
	}
	l.pulse.heard = time.Now()
	worker := l.worker
	r.mu.Unlock()
	switch m := m.(type) {
	case control.Sources:
		if r.supply != nil {
			r.supply.Named(m.Folder, m.Patterns)
		}
		return l
	case control.Lacks:
		if r.supply == nil {
			l.to.put(control.Got{ID: m.ID, None: true})
		} else {
			r.working.Go(func() { r.supply.Answer(m, l.to.put) })
		}
		return l
	}
	ready, ok := m.(control.Ready)
	if !ok || worker == nil {
		r.pass(l, m)
		return l
	}
	path := cmp.Or(worker.Program(), r.c.Executable)
	if path == "" {
		r.pass(l, ready)
		return l
	}
	// Reading the program may take a while, in which the worker's beats have to go on.
	r.working.Go(func() {
		ready.Job.ProgramSHA256 = r.program.sum(path)
		r.pass(l, ready)
	})
	return l
}

// program is the one that a worker was started from last. Many have the same.
type program struct {
	mu   sync.Mutex
	file os.FileInfo // nil: none yet
	hash string
}

// sum returns the SHA-256 of a program, "" if it cannot be read: it is only a record. A file that was read before, and has its size and its time still, is not read again.
func (p *program) sum(path string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	file, err := os.Stat(path)
	if err != nil {
		return ""
	}
	if was := p.file; was != nil && os.SameFile(was, file) && was.Size() == file.Size() && was.ModTime().Equal(file.ModTime()) {
		return p.hash
	}
	hash, err := rundir.FileSHA256(path)
	if err != nil {
		return ""
	}
	p.file, p.hash = file, hash
	return hash
}

// pass keeps what a new leader has to know of a message, and tells the leader of the moment.
func (r *relay) pass(l *local, m control.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.next != nil {
		return // its session is over
	}
	switch said := m.(type) {
	case control.Beat:
		if r.out == nil || !r.out.empty() {
			return
		}
	case control.Hello:
		l.hello = m
	case control.Note:
		l.note = m
	case control.Ready:
		l.ready = m
	case control.Step:
		if !r.c.alone() { // no other host will ever lead
			l.steps = append(l.steps, said)
			l.steps = l.steps[max(0, len(l.steps)-maxReported):]
		}
	case control.Saved:
		l.saved = m
	case control.Delivered:
		l.delivered = m
	case control.Done:
		l.done = m
	case control.Failed:
		l.failed = m
	case control.Leave:
		l.leave = m
	}
	r.tell(relayed{m, l.who})
}

// tell sends to the leader, if there is a link; r.mu is held.
func (r *relay) tell(m control.Message) {
	if r.out != nil {
		r.out.put(m)
	}
}

// account is all that a new leader has to know; r.mu is held.
func (r *relay) account(q outbox, since control.Lead) {
	for _, l := range r.locals {
		say := func(m control.Message) {
			if m != nil {
				q.put(relayed{m, l.who})
			}
		}
		say(l.hello)
		if !l.started {
			say(l.note) // what it does before training
		}
		say(l.ready)
		first := len(l.steps)
		for first > 0 {
			if s := l.steps[first-1]; s.Plan < since.Plan || s.Plan == since.Plan && s.Step <= since.Step {
				break
			}
			first--
		}
		for _, s := range l.steps[max(0, min(first, len(l.steps)-1)):] { // the newest in any case
			say(s)
		}
		say(l.saved)
		say(l.delivered)
		say(l.done)
		say(l.leave)
		say(l.failed)
		if !l.halted.IsZero() && l.next == nil {
			q.put(haltedOf(l))
		}
		l.sayEnd(q)
	}
	if r.watches {
		q.put(watchOf(true))
	}
	q.put(control.Told{})
	if r.departs {
		q.put(control.Leave{})
	}
}

// hear takes in what the leader says.
func (r *relay) hear(m control.Message) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heard = time.Now()
	switch m := m.(type) {
	case control.Beat:
		if r.crowdThere = 0; m.Crowd > 0 {
			r.crowdThere = m.Crowd
		}
	case control.Copy, control.Shown, control.Alive:
	case control.OpenClocks, control.SetClock:
		return r.hearClocks(m)
	case control.Asked:
		r.inject(m)
	case control.Answered:
		return r.asks.answered(m)
	case control.Kill:
		switch l := r.find(id.Session{Worker: id.WorkerID(m.Worker), Incarnation: m.Incarnation}); {
		case l == nil:
		case l.worker == nil:
			l.unwanted = true
		case m.Stacks:
			l.worker.Quit()
		default:
			l.worker.Kill()
		}
	case control.Fence:
		r.fence(m)
	case control.Survey, control.Keep, control.Drop:
		r.keepShards(m)
	case control.Leave:
		if r.departs {
			r.departs, r.leaving = false, false
			close(r.left)
		}
	case control.Begin:
		r.join(id.Session{Worker: id.WorkerID(m.Worker), Incarnation: m.Incarnation})
	case relayed:
		return r.deliver(m)
	default:
		return errUnexpected(m)
	}
	return nil
}

// deliver hands a message to a worker; r.mu is held. What a worker is told once, another leader may tell it again.
func (r *relay) deliver(m relayed) error {
	l := r.find(m.worker)
	if l == nil {
		return errUnexpected(m)
	}
	if l.next != nil {
		return nil // another leader does not know yet that its session is over
	}
	var told *bool
	switch said := m.Message.(type) {
	case control.Start:
		r.gossip.Join(said.Ring.Seeds)
		told = &l.started
		if r.c.Apart {
			said.RunDir = r.c.RunDir.Path()
			said.Threads = cmp.Or(r.c.threads, said.Threads)
			m.Message = said
		}
	case control.Stop:
		told = &l.stopped
	case control.Release:
		told = &l.released
	case control.Order:
		if said.Rollback {
			l.done = nil
		}
		if r.c.Apart && said.From != "" {
			var err error
			said.From = r.c.RunDir.Path()
			if m.Message, err = said.Share(); err != nil {
				return err
			}
		}
	}
	if told != nil {
		if *told {
			return nil
		}
		*told = true
	}
	l.to.put(m.Message)
	if _, start := m.Message.(control.Start); start && r.leaving && l.worker != nil {
		l.worker.Leave()
	}
	return nil
}
