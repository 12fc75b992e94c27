package host

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/host/logs"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/host/socket"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// commands takes in what other processes of this user have to say about a run: [control.Stop], [control.Add], [control.Inject], or
// [control.Fault] for a fault that was injected into a worker. They find the socket in workers.json of the run directory, and beside it
// the key that they prove to hold.
type commands struct {
	listener *socket.Listener
	talks    sync.WaitGroup
}

func listenForCommands() (*commands, error) {
	l, err := socket.Listen()
	if err != nil {
		return nil, err
	}
	return &commands{listener: l}, nil
}

// command is what another process wants. reply, which never waits, is called once, unless the run ends.
type command struct {
	control.Message
	reply func(control.Message)
}

// serve hands commands to take until close is called.
func (c *commands) serve(ctx context.Context, take func(command)) {
	defer c.talks.Wait()
	for {
		nc, err := auth.Accept(ctx, c.listener)
		if err != nil {
			return
		}
		c.talks.Go(func() {
			conn := control.New(nc)
			defer conn.Close()
			if c.listener.Admit(nc) != nil {
				return // a caller without the key
			}
			for {
				m, err := conn.Receive(ctx)
				if err != nil {
					return
				}
				answer := make(chan control.Message, 1)
				take(command{m, func(m control.Message) { answer <- m }})
				select {
				case m = <-answer:
				case <-ctx.Done():
					return
				}
				if conn.Send(m) != nil {
					return
				}
			}
		})
	}
}

// ForgetSockets removes the sockets of a host's process that has exited, perhaps before its workers had connected.
func ForgetSockets(pid int) { socket.ForgetProcess(pid) }

// A Door takes in what other processes have to say about a run before it has a leader: it passes on stops, and refuses the rest.
type Door struct {
	commands *commands
	leave    context.CancelFunc
	served   sync.WaitGroup
}

// OpenDoor opens the door of a run, which the leader replaces in workers.json.
func OpenDoor(dir *rundir.Dir, stop func()) (*Door, error) {
	c, err := listenForCommands()
	if err != nil {
		return nil, err
	}
	if err := dir.WriteWorkers(rundir.Workers{Agent: c.listener.Path()}); err != nil {
		_ = c.close() // the error that counts is the one before
		return nil, &session.FileError{Err: err}
	}
	ctx, leave := context.WithCancel(context.Background())
	d := &Door{commands: c, leave: leave}
	d.served.Go(func() {
		c.serve(ctx, func(c command) {
			switch c.Message.(type) {
			case control.Stop:
				stop()
				c.reply(c.Message)
			case control.Add:
				c.reply(control.Added{Refusal: "the run has not begun yet"})
			default:
				c.reply(control.Refused{Text: "the run has not begun yet"})
			}
		})
	})
	return d, nil
}

// Close closes the door. The leader's own stays. It may be called again.
func (d *Door) Close() {
	d.leave()
	_ = d.commands.close() // a socket that is left behind is removed by the next process
	d.served.Wait()
}

// ForgetSocket removes the socket that workers.json of a run directory names, unless the process that made it lives.
func ForgetSocket(runDir string) {
	if run, err := rundir.ReadWorkers(runDir); err == nil {
		socket.Forget(run.Agent)
	}
}

// stampedFault returns what a session is told of a fault of f.Worker.
func stampedFault(f session.FaultStamped, m control.Fault) session.Event {
	if m.Kind != control.Thaw {
		f.At = stamped(m.At)
	}
	return f
}

func (c *commands) close() error {
	defer c.listener.Remove()
	return c.listener.Close()
}

// Where each host has a run directory of its own (Config.Apart), each takes commands, and passes them to the leader (control.Asked),
// which answers. The leader has the hosts of workers inject faults into them in the same way: processes of another machine cannot be
// reached.

// maxAsks bounds the questions that wait for an answer.
const maxAsks = 64

// asks are questions to the other end of a link.
type asks struct {
	last  uint64
	waits map[uint64]func(control.Message)
}

// ask sends a message to an outbox. answer is called once, here or later.
func (a *asks) ask(to outbox, m control.Message, answer func(control.Message)) {
	if len(a.waits) >= maxAsks {
		answer(control.Refused{Text: "too many commands wait for an answer: try again"})
		return
	}
	body, err := control.Marshal(m)
	if err != nil {
		answer(control.Refused{Text: session.OneLine(err.Error())})
		return
	}
	if a.waits == nil {
		a.waits = make(map[uint64]func(control.Message))
	}
	a.last++
	a.waits[a.last] = answer
	to.put(control.Asked{ID: a.last, Message: body})
}

// answered takes in an answer.
func (a *asks) answered(m control.Answered) error {
	answer := a.waits[m.ID]
	if answer == nil {
		return nil // it came too late
	}
	said, err := control.Unmarshal(m.Message)
	if err != nil {
		return err
	}
	delete(a.waits, m.ID)
	answer(said)
	return nil
}

// refuse answers all questions.
func (a *asks) refuse(text string) {
	waits := a.waits
	a.waits = nil
	for _, answer := range waits {
		answer(control.Refused{Text: text})
	}
}

// answer sends an answer.
func answer(to outbox, id uint64, m control.Message) {
	if body, err := control.Marshal(m); err == nil {
		to.put(control.Answered{ID: id, Message: body})
	}
}

// ask passes a command to the leader.
func (r *relay) ask(c command) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch c.Message.(type) {
	case control.ReadLog:
		r.logs(c)
		return
	case control.Stop, control.Add, control.Inject:
	default:
		c.reply(control.Refused{Text: "a run over several machines takes no such command"})
		return
	}
	if r.out == nil {
		c.reply(control.Refused{Text: r.c.self().Name + " hears of no leader now: try again"})
		return
	}
	r.asks.ask(r.out, c.Message, c.reply)
}

// logs has another host, or all others, say what its logs have; r.mu is held.
func (r *relay) logs(c command) {
	m := c.Message.(control.ReadLog)
	ctx, others := r.ctx, slices.DeleteFunc(r.c.hostNames(), func(name string) bool { return name == r.c.self().Name })
	r.working.Go(func() {
		if m.Host != "" {
			c.reply(r.otherLogs().Ask(ctx, m.Host, m))
		} else {
			c.reply(r.otherLogs().List(ctx, others))
		}
	})
}

func (r *relay) otherLogs() logs.Hosts { return logs.Hosts{Dial: r.dialHost} }

// gatherLogs writes the ends of all logs into the run directory of this host, which leads, for all hosts to have a copy. linked are the
// others that take part.
func (r *relay) gatherLogs(ctx context.Context, linked []string) {
	dir, self := r.c.RunDir.Path(), r.c.self().Name
	gone := slices.DeleteFunc(r.c.hostNames(), func(name string) bool { return name == self || slices.Contains(linked, name) })
	_ = rundir.WriteOthers(dir, r.otherLogs().Gather(ctx, dir, self, linked, gone)) // the logs are on their hosts still
}

// passStop tells the leader, on another machine, that this one was asked to stop the run: the next leader, where there is none now.
func (r *relay) passStop(stop session.StopAsked) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.out == nil {
		r.stops = append(r.stops, stop)
		if r.c.Waits != nil {
			r.c.Waits(r.c.self().Name + " hears of no leader now, and passes the stop on to the next one")
		}
		return
	}
	r.askStop(stop)
}

// askStop asks the leader to stop the run, and the next one if it goes away before it has answered; r.mu is held, then as well.
func (r *relay) askStop(stop session.StopAsked) {
	r.asks.ask(r.out, control.Stop{Reason: string(stop.Reason)}, func(m control.Message) {
		if _, refused := m.(control.Refused); refused {
			r.stops = append(r.stops, stop)
		}
	})
}

// watch tells this leader, and later ones, whether timelines are wanted on this host.
func (r *relay) watch(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watches = on
	r.tell(watchOf(on))
}

func watchOf(on bool) control.Watch {
	if on {
		return control.Watch{Every: 1}
	}
	return control.Watch{}
}

// watchedOn takes in whether timelines are wanted on a host: they are made while they are wanted on any.
func (r *run) watchedOn(host int, on bool) {
	was := len(r.watched) > 0
	if delete(r.watched, host); on {
		r.watched[host] = true
	}
	if on = len(r.watched) > 0; on != was {
		r.step(session.WatchAsked{On: on})
	}
}

// speakTo sets to where the leader is told; r.mu is held.
func (r *relay) speakTo(out outbox) {
	r.asks.refuse("the leader went away, and whether the command was carried out is not known: see launcher status")
	if r.setClocks != nil && r.out != nil {
		r.setClocks.End(r.out)
	}
	if r.out = out; out != nil {
		stops := r.stops
		r.stops = nil
		for _, stop := range stops {
			r.askStop(stop)
		}
	}
}

// alive returns what workers.json of this host says.
func (r *relay) alive(workers []rundir.Process) rundir.Workers {
	return rundir.Workers{Agent: r.commands.listener.Path(), Host: r.c.self().Name, Workers: workers}
}

// inject injects a fault into workers of this host, as the leader wants; r.mu is held.
func (r *relay) inject(asked control.Asked) {
	out := r.out
	m, err := control.Unmarshal(asked.Message)
	in, ok := m.(control.Inject)
	if err != nil || !ok || out == nil {
		return // the answer is that the link ends
	}
	var faults []string
	var targets []rundir.Process
	for _, w := range in.Workers {
		p, err := r.process(w)
		if err != nil {
			faults = append(faults, err.Error())
		} else {
			targets = append(targets, p)
		}
	}
	r.working.Go(func() {
		for _, p := range targets {
			if err := r.c.Inject(in.Kind, p, in.Factor); err != nil {
				faults = append(faults, fmt.Sprintf("worker %d: %s", p.ID, session.OneLine(err.Error())))
			}
		}
		if len(faults) > 0 {
			m = control.Refused{Text: strings.Join(faults, "\n")}
		}
		answer(out, asked.ID, m)
	})
}

// process returns the process of a worker of this host; r.mu is held.
func (r *relay) process(worker int) (p rundir.Process, err error) {
	for _, l := range slices.Backward(r.locals) {
		hello, ok := l.hello.(control.Hello)
		if int(l.who.Worker) != worker || !ok || l.exit != nil {
			continue
		}
		if r.c.Inject == nil {
			return p, fmt.Errorf("worker %d: this run takes no faults", worker)
		}
		return rundir.Process{ID: worker, Incarnation: l.who.Incarnation, PID: hello.PID}, nil
	}
	return p, fmt.Errorf("worker %d has ended", worker)
}

// heardAsk takes in what a host asks or answers.
func (r *run) heardAsk(e hostSaid) {
	switch said := e.m.(type) {
	case control.Asked:
		out := r.hosts.hosts[e.host].out
		if m, err := control.Unmarshal(said.Message); err == nil && out != nil {
			r.command(command{m, func(m control.Message) { answer(out, said.ID, m) }})
		}
	case control.Answered:
		if a := r.asks[e.host]; a != nil {
			_ = a.answered(said) // what cannot be read is no answer
		}
	case control.Watch:
		r.watchedOn(e.host, said.Every > 0)
	}
}

// unanswered takes in that the link of a host has ended.
func (r *run) unanswered(host int) {
	r.watchedOn(host, false)
	if a := r.asks[host]; a != nil {
		a.refuse("the link to " + r.hosts.addrs[host].Name + " has ended, and whether the command was carried out there is not known")
	}
}

// command does what a command wants.
func (r *run) command(c command) {
	switch m := c.Message.(type) {
	case control.Stop:
		reason := session.Stopped
		if asked := session.Reason(m.Reason); asked == session.Interrupt || asked == session.Terminated {
			reason = asked
		}
		r.step(session.StopAsked{Reason: reason})
	case control.Fault:
		r.step(stampedFault(session.FaultStamped{Worker: -1, ID: m.Worker}, m))
	case control.Add:
		r.step(session.AddWorkers{N: m.N})
		c.reply(control.Added{Workers: r.answer.IDs, Refusal: r.answer.Refusal})
		return
	case control.Inject:
		r.inject(m, c.reply)
		return
	default:
		c.reply(control.Refused{Text: fmt.Sprintf("the run takes no %T", m)})
		return
	}
	c.reply(c.Message) // it was heard
}

// inject has the hosts of workers inject a fault into them.
func (r *run) inject(in control.Inject, reply func(control.Message)) {
	var faults []string
	on := make(map[int][]int) // workers by host
	for _, w := range in.Workers {
		if host, err := r.hosts.reach(w); err != nil {
			faults = append(faults, err.Error())
		} else {
			on[host] = append(on[host], w)
		}
	}
	left := len(on)
	end := func() {
		switch {
		case left > 0:
		case len(faults) > 0:
			reply(control.Refused{Text: strings.Join(faults, "\n")})
		default:
			reply(in)
		}
	}
	if left == 0 {
		end()
		return
	}
	for host, workers := range on {
		for _, w := range workers {
			if in.Stamp { // before, as the run may have recovered from a death before its host answers
				r.step(session.FaultStamped{Worker: -1, ID: w, At: time.Now()})
			}
		}
		if r.asks[host] == nil {
			r.asks[host] = new(asks)
		}
		r.asks[host].ask(r.hosts.hosts[host].out, control.Inject{Kind: in.Kind, Workers: workers, Factor: in.Factor}, func(m control.Message) {
			no, refused := m.(control.Refused)
			if refused {
				faults = append(faults, no.Text)
			}
			for _, w := range workers {
				if refused && in.Stamp || in.Kind == control.Thaw {
					r.step(session.FaultStamped{Worker: -1, ID: w}) // it counts only if the worker dies of something else
				}
			}
			left--
			end()
		})
	}
}

// reach returns the host of a worker that lives, which has a link.
func (r *roster) reach(worker int) (host int, err error) {
	for _, m := range slices.Backward(r.members) {
		if m.who.Worker != id.WorkerID(worker) || m.exited {
			continue
		}
		if h := r.hosts[m.host]; h.out == nil {
			return 0, fmt.Errorf("worker %d: there is no link to its host, %s", worker, r.addrs[m.host].Name)
		}
		return m.host, nil
	}
	return 0, fmt.Errorf("worker %d has ended", worker)
}
