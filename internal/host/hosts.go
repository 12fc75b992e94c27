package host

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/host/agree/raftlog"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// HostAddr is one of the hosts of a run.
type HostAddr struct {
	Name    string `json:"name"`
	Voter   bool   `json:"voter"`
	Agree   string `json:"agree"`   // address of its part in the agreement
	Link    string `json:"link"`    // where other agents reach it
	Workers []int  `json:"workers"` // those that it starts
}

// HostConfig says what the agent of one of several hosts does.
type HostConfig struct {
	// Run is the configuration of the run, the same on every host. Its RunDir, View and
	// Output stay empty.
	Run Config

	Hosts  []HostAddr // all of them, in one order everywhere
	Self   int        // which of them this is
	Secret []byte     // known to the agents only

	// RunDir is the path of the run directory, which somebody else has made and will close,
	// and Shown what people call it. It is the same directory on every host.
	RunDir, Shown string
	// Store is the directory of this host's log of the agreement.
	Store string

	// Agree and Link are the listeners behind the addresses of this host. Serve closes them.
	Agree, Link net.Listener

	// Command starts a worker, once its WorkerID is set, and Log opens the file for what it prints.
	Command Command
	Log     func(id, incarnation int) (*os.File, error)

	// Show returns what shows the run, and takes its output, while this host leads in a
	// term. Several terms may overlap for a moment; the greatest counts.
	Show func(term uint64) (view.View, io.Writer)
	// Telemetry begins what gets spans and measures while this host leads in a term; it may be nil, and
	// return nil.
	Telemetry func(term uint64) (Telemetry, error)
	// Done is told how the run has ended, by the host that leads.
	Done func(term uint64, o session.Outcome)

	// Waits is told, in a sentence, what this host waits for when its workers hold since it
	// hears of no leader; nil is nobody.
	Waits func(text string)

	Logger *slog.Logger // nil is nowhere
}

func (c *HostConfig) host(name string) int {
	return slices.IndexFunc(c.Hosts, func(h HostAddr) bool { return h.Name == name })
}

// detect is the budget for links between agents.
func (c *HostConfig) detect() time.Duration {
	if c.Run.Detect == 0 {
		return time.Hour
	}
	return c.Run.Detect
}

// silence is how long an agent may be silent, so that its host is out of the plan within the budget.
func (c *HostConfig) silence() time.Duration { return c.detect() * 3 / 4 }

// waits says what a host without a leader waits for.
func (c *HostConfig) waits() string {
	var others []string
	voters := 0
	for i, h := range c.Hosts {
		if h.Voter {
			voters++
			if i != c.Self {
				others = append(others, h.Name)
			}
		}
	}
	return fmt.Sprintf("%s hears of no leader, and its workers hold: %d of %d hosts that vote have to be there; it waits for %s",
		c.Hosts[c.Self].Name, voters/2+1, voters, strings.Join(others, ", "))
}

// workers is the number of workers of the run.
func (c *HostConfig) workers() (n int) {
	for _, h := range c.Hosts {
		n += len(h.Workers)
	}
	return n
}

// patience is by how much the agreement may be slower than the detection of workers: on a
// machine that is busy, a leader must not be taken for dead because nothing ran for a moment. One
// whose process has ended is replaced at once all the same, see relay.succeed.
const patience = 3

// Host is the agent of one of several hosts.
type Host struct {
	c     HostConfig
	stops chan session.Reason
	watch *watching
}

// NewHost returns the agent for a valid configuration.
func NewHost(c HostConfig) (*Host, error) {
	run := c.Run
	run.Respawn = false // every host can start workers
	if err := run.Validate(); err != nil {
		return nil, err
	}
	return &Host{c: c, stops: make(chan session.Reason, 2), watch: newWatching()}, nil
}

// Stop asks the run to stop, as [Agent.Stop] does. Every host has to be asked: the one that leads
// acts on it, and whoever leads next knows of it.
func (h *Host) Stop(r session.Reason) {
	select {
	case h.stops <- r:
	default:
	}
}

// Serve keeps this host's part of the run until ctx ends; its workers end with it. An
// error means that it could not begin, or could not go on.
func (h *Host) Serve(ctx context.Context) error {
	c := &h.c
	defer c.Agree.Close()
	defer c.Link.Close()
	secure, err := comm.TLSFromSecret(c.Secret)
	if err != nil {
		return err
	}
	var servers []agree.Server
	for _, x := range c.Hosts {
		servers = append(servers, agree.Server{ID: x.Name, Addr: x.Agree, Voter: x.Voter})
	}
	node, err := raftlog.Open(raftlog.Config{
		Dir: c.Store, ID: c.Hosts[c.Self].Name, Listener: c.Agree, Secret: c.Secret, Bootstrap: servers, Detect: patience * max(c.Run.Detect, time.Second), Logger: c.Logger,
		Resolve: func(id string) string {
			if i := c.host(id); i >= 0 {
				return c.Hosts[i].Agree
			}
			return ""
		},
	})
	if err != nil {
		return err
	}
	defer node.Close() // what is agreed is synced
	r := newRelay(c, secure)
	defer r.killAll()
	if err := r.begin(); err != nil {
		return err
	}

	r.elections = node
	if r.gossip, r.noRing = openHostRing(c); r.gossip != nil {
		defer r.gossip.close()
	}
	ctx, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel()
	tasks.Go(func() { r.run(ctx) })
	s := &seat{h: h, node: node, relay: r, again: make(chan *lead, 1)}
	tasks.Go(func() { s.accept(ctx, secure) })
	defer s.leave()
	for {
		select {
		case l, ok := <-node.Changes():
			if !ok {
				return agree.ErrClosed
			}
			if l.Ready && s.lead != nil && s.lead.term == l.Term {
				r.follow(l)
				continue
			}
			s.leave()
			if l.Ready {
				s.take(ctx, l.Term, 0, 0)
			}
			r.follow(l)
		case old := <-s.again:
			if s.lead == old {
				s.leave()
				s.take(ctx, old.term, old.attempt, old.fills)
			}
		case reason := <-h.stops:
			s.stop(reason)
		case <-ctx.Done():
			return nil
		}
	}
}

// StartError means that the program could not be started.
type StartError struct{ Err error }

func (e *StartError) Error() string { return fmt.Sprintf("cannot be started: %v", e.Err) }
func (e *StartError) Unwrap() error { return e.Err }

// seat is where a host's leadership is, if it has any.
type seat struct {
	h     *Host
	node  agree.Log
	relay *relay
	again chan *lead
	asked []session.Reason // to stop, since the host began

	lead    *lead // of the host's loop
	stops   chan session.Reason
	deposed chan struct{}
	ended   chan struct{}

	mu   sync.Mutex
	open *lead // that takes links; the same
	ctx  context.Context
}

// take begins to lead.
func (s *seat) take(ctx context.Context, term, attempt uint64, fills int) {
	l := newLead(&s.h.c, s.node, term, s.relay)
	l.attempt, l.fills = attempt, fills
	l.again = func() {
		select {
		case s.again <- l:
		default:
		}
	}
	s.lead, s.stops = l, make(chan session.Reason, 2)
	s.deposed, s.ended = make(chan struct{}), make(chan struct{})
	for _, r := range s.asked {
		s.stops <- r
	}
	deposed, ended, stops := s.deposed, s.ended, s.stops
	go func() {
		defer close(ended)
		out, err := l.serve(ctx, s, stops, deposed)
		switch {
		case errors.Is(err, errDeposed):
			return
		case err != nil:
			out = session.Outcome{Err: err}
		}
		s.h.c.Done(term, out)
	}()
}

// leave ends the leadership, if there is one.
func (s *seat) leave() {
	if s.lead == nil {
		return
	}
	close(s.deposed)
	<-s.ended
	s.lead = nil
}

func (s *seat) stop(r session.Reason) {
	if len(s.asked) == 2 {
		return
	}
	s.asked = append(s.asked, r)
	if s.lead != nil {
		s.stops <- r // there is room for two
	}
}

// admit sets who takes links; nil is nobody.
func (s *seat) admit(ctx context.Context, l *lead) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open, s.ctx = l, ctx
}

// accept takes links from other agents, and from this one, for whoever leads.
func (s *seat) accept(ctx context.Context, secure *tls.Config) {
	c := &s.h.c
	stop := context.AfterFunc(ctx, func() { _ = c.Link.Close() })
	defer stop()
	var links sync.WaitGroup
	defer links.Wait()
	unproven := make(chan struct{}, maxUnproven)
	for {
		nc, err := c.Link.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			select { // out of file descriptors, perhaps
			case <-time.After(retryEvery):
			case <-ctx.Done():
			}
			continue
		}
		select {
		case unproven <- struct{}{}:
		default:
			_ = nc.Close()
			continue
		}
		links.Go(func() {
			conn := control.New(tls.Server(nc, secure))
			defer conn.Close()
			host, err := greet(ctx, conn, c)
			<-unproven
			if err != nil {
				return // peers try again
			}
			s.mu.Lock()
			l, ctx := s.open, s.ctx
			if l != nil {
				l.tasks.Add(1)
			}
			s.mu.Unlock()
			if l == nil {
				return
			}
			defer l.tasks.Done()
			end := context.AfterFunc(ctx, func() { _ = conn.Close() })
			defer end()
			l.link(ctx, conn, host)
		})
	}
}

// maxUnproven bounds the connections that have yet to show that they know the secret.
const maxUnproven = 64

// greet reads which host is at the other end, which shows that it knows the secret.
func greet(ctx context.Context, conn *control.Conn, c *HostConfig) (host int, err error) {
	ctx, cancel := context.WithTimeout(ctx, max(c.detect(), time.Second))
	defer cancel()
	m, err := conn.Receive(ctx)
	if err != nil {
		return 0, err
	}
	hello, ok := m.(control.Host)
	if !ok || hello.Protocol != control.Protocol || hello.Host < 0 || hello.Host >= len(c.Hosts) {
		return 0, fmt.Errorf("agent: a link that begins with %T", m)
	}
	return hello.Host, nil
}

// errDeposed ends the work of a leader that is none any more.
var errDeposed = errors.New("agent: another one leads")

// serve leads: it makes or goes on with the run until that has ended, or deposed is closed.
func (l *lead) serve(ctx context.Context, s *seat, stops <-chan session.Reason, deposed <-chan struct{}) (session.Outcome, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer l.tasks.Wait()
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	l.tasks.Go(func() {
		select {
		case <-deposed:
			cancel()
		case <-stop:
		}
	})
	c := l.c
	if l.node.State().Generation == 0 {
		if _, err := l.node.Propose(ctx, agree.Generation{N: 1}); err != nil {
			return session.Outcome{}, errDeposed // or nothing works, and another one tries
		}
	}
	dir := rundir.Attach(c.RunDir, c.Shown)
	in, err := inherit(l.node.State(), dir)
	if err != nil {
		return session.Outcome{}, err
	}
	l.fresh = in == nil
	l.since = control.Lead{Term: l.term}
	if in != nil && in.History.Last != nil {
		l.since.Plan, l.since.Step = in.History.Last.Plan, in.History.Last.Step
	}
	cfg := c.Run
	cfg.RunDir = dir
	cfg.View, cfg.Output = c.Show(l.term)
	if c.Telemetry != nil {
		if cfg.Telemetry, err = c.Telemetry(l.term); err != nil {
			return session.Outcome{}, err
		}
	}
	cfg = cfg.withDefaults(c.workers())
	sc := cfg.session(len(l.workers))
	sc.CanStart, sc.Term, sc.Attempt, sc.Fills, sc.Leader, sc.Inherited = true, l.term, l.attempt, l.fills, c.Hosts[c.Self].Name, in
	if in != nil {
		members := in.Members()
		for _, w := range l.workers {
			w.fenced = !session.HasPart(members, plan.Worker{ID: id.WorkerID(w.id)})
		}
		for _, w := range members {
			if l.find(int(w.ID), w.Incarnation) == nil {
				l.workers = append(l.workers, l.session(int(w.ID), w.Incarnation, max(c.host(w.Host), 0)))
			}
		}
	}
	var workers []Worker
	var all []plan.Worker
	for _, w := range l.workers {
		workers = append(workers, w)
		all = append(all, plan.Worker{ID: id.WorkerID(w.id), Incarnation: w.life, Host: c.Hosts[w.host].Name})
	}
	sess := session.New(sc, all)
	r := newRun(cfg, workers, sess, s.h.watch)
	r.gossip, r.noRing = s.relay.gossip, s.relay.noRing
	r.start = l.start
	l.back = func(host string) { r.post(session.HostBack{Host: host}) }
	r.agreement = &agreement{node: l.node, term: l.term, entries: make(chan proposal, 64)}
	r.deposed = deposed
	s.admit(ctx, l)
	defer s.admit(ctx, nil)
	l.welcome(time.Now())
	l.tasks.Go(func() { l.watch(ctx) })
	out := r.loop(context.Background(), stops)
	l.attempt, l.fills = sess.Last()
	select {
	case <-deposed:
		return session.Outcome{}, errDeposed
	default:
		return out, nil
	}
}

// inherit reads what there is of a run; nil if it has not begun.
func inherit(state agree.State, dir *rundir.Dir) (*session.Inherited, error) {
	if len(state.Plans) == 0 {
		return nil, nil
	}
	in, err := parseAgreed(state)
	if err != nil {
		return nil, err
	}
	ForgetSocket(dir.Path())
	if err := dir.Resume(); err != nil {
		return nil, &session.FileError{Err: err}
	}
	if in.History, err = rundir.ReadHistory(dir.Path()); err != nil {
		return nil, &session.FileError{Err: err}
	}
	saved, err := checkpoint.List(dir.Path())
	if err != nil {
		return nil, &session.FileError{Err: err}
	}
	// Whether one can be used is found out before the run goes back to it.
	if i := slices.IndexFunc(saved, func(e checkpoint.Entry) bool { return e.Err == nil }); i >= 0 {
		in.Saved = saved[i].Step
	}
	return in, nil
}

// parseAgreed reads the orders that are agreed.
func parseAgreed(state agree.State) (*session.Inherited, error) {
	in := &session.Inherited{}
	for _, p := range state.Plans {
		o, err := control.ParseOrder(p.Data)
		if err != nil {
			return nil, err
		}
		in.Add(o, p.Reason)
	}
	return in, nil
}
