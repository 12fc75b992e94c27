package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"sync"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/net/admit"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/away"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/detach"
	"github.com/soliton-train/soliton/launcher/internal/door"
	"github.com/soliton-train/soliton/launcher/internal/ship"
	"github.com/soliton-train/soliton/launcher/internal/torch"
)

// A run over several machines begins on one of them, whose launcher gathers the others: each of them joins with the ticket, and all
// are told who takes part. From then on all are equal. Each machine has an agent, a launcher that shows the run, and a run
// directory of its own.

// call is what the launcher of another machine asks the one that gathers: to take part or, with Fetch, for a part of the program,
// with Records for one of the run's records.
type call struct {
	Protocol int    `json:"protocol"`
	System   string `json:"system"`
	Name     string `json:"name"`    // of the machine
	Workers  int    `json:"workers"` // 0: as many as on the first one
	Agree    string `json:"agree"`   // HOST:PORT; without a host, that of the connection
	Link     string `json:"link"`

	Ports ports.Range `json:"ports"` // of the machine

	Fetch   *ship.Part `json:"fetch,omitempty"`
	Records *records   `json:"records,omitempty"`
}

// gathering waits for the machines of a run.
type gathering struct {
	first assignment // of this machine, whose name and addresses are there
	dir   string     // its run directory
	want  int        // machines
	say   func(string)
	door  *door.Door

	mu      sync.Mutex
	joined  []*joining
	whole   chan struct{} // closed when all are there
	short   chan struct{} // closed when too many cannot be there
	least   int           // machines to begin with, if others cannot be there
	failed  []error       // of machines that cannot be there
	begun   assignment    // of all
	closing bool
}

type joining struct {
	host    host.Addr
	workers int
	self    int
	late    bool // the run has begun
}

var machineName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$`)

// nameOf returns the name of a host: that of its machine, if it can be one and no other host has it.
func nameOf(machine string, others []host.Addr) string {
	if !machineName.MatchString(machine) {
		machine = fmt.Sprintf("host-%d", len(others))
	}
	name := machine
	for i := 2; slices.ContainsFunc(others, func(h host.Addr) bool { return h.Name == name }); i++ {
		name = fmt.Sprintf("%s-%d", machine, i)
	}
	return name
}

// handle answers a machine that has a good token.
func (g *gathering) handle(ctx context.Context, from net.Addr, request []byte) ([]byte, error) {
	var c call
	if json.Unmarshal(request, &c) != nil {
		return nil, errors.New("its request cannot be read")
	}
	if c.Protocol != control.Protocol {
		return nil, fmt.Errorf("its launcher speaks protocol %d, and the run's %d: use the same launcher", c.Protocol, control.Protocol)
	}
	if own := system(); c.System != own {
		return nil, fmt.Errorf("it is %s, and the program is for %s", c.System, own)
	}
	if c.Fetch != nil {
		return g.first.Program.Read(*c.Fetch)
	}
	if c.Records != nil {
		return g.records(*c.Records)
	}
	if c.Workers < 0 || c.Workers > session.MaxWorkers {
		return nil, fmt.Errorf("--workers %d: give 1 to %d", c.Workers, session.MaxWorkers)
	}
	if err := roomFor(c.Ports, cmp.Or(c.Workers, g.first.first()), true); err != nil {
		return nil, err
	}
	j, err := g.enter(c, from)
	if err != nil {
		return nil, err
	}
	if j.late {
		a := g.begun
		a.Enters = &j.host
		return json.Marshal(a)
	}
	select {
	case <-g.whole:
	case <-ctx.Done():
		g.leave(j)
		return nil, ctx.Err()
	}
	a := g.begun
	a.Self = j.self
	return json.Marshal(a)
}

func system() string { return runtime.GOOS + "/" + runtime.GOARCH }

// enter takes a machine in.
func (g *gathering) enter(c call, from net.Addr) (*joining, error) {
	ip := netip.Addr{}
	if a, err := netip.ParseAddrPort(from.String()); err == nil {
		ip = a.Addr().Unmap()
	}
	agree, err := addrOf(c.Agree, ip)
	if err != nil {
		return nil, err
	}
	link, err := addrOf(c.Link, ip)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing {
		// The run's leader gives it its name, and tells the others.
		h := host.Addr{Name: nameOf(c.Name, nil), Agree: agree, Link: link, Starts: cmp.Or(c.Workers, g.begun.first())}
		return &joining{host: h, late: true}, nil
	}
	if len(g.joined) == 0 {
		own := g.door.Own(from)
		for _, addr := range []*string{&g.first.Hosts[0].Agree, &g.first.Hosts[0].Link} {
			if *addr, err = addrOf(*addr, own); err != nil {
				return nil, err
			}
		}
	}
	others := []host.Addr{g.first.Hosts[0]}
	for _, j := range g.joined {
		others = append(others, j.host)
	}
	j := &joining{host: host.Addr{Name: nameOf(c.Name, others), Agree: agree, Link: link}, workers: c.Workers}
	g.joined = append(g.joined, j)
	if missing := g.want - 1 - len(g.joined); missing > 0 {
		g.say(fmt.Sprintf("%s joins; waiting for %s", j.host.Name, count(missing, "more machine")))
		return j, nil
	}
	g.say(j.host.Name + " joins")
	g.settle()
	return j, nil
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// addrOf completes an address without a host.
func addrOf(addr string, ip netip.Addr) (string, error) {
	h, port, err := net.SplitHostPort(addr)
	if err != nil || port == "" || len(addr) > maxAddr {
		return "", fmt.Errorf("its address %.80q cannot be read", addr)
	}
	if given, err := netip.ParseAddr(h); h != "" && (err != nil || !given.IsUnspecified()) {
		return addr, nil
	}
	if !ip.IsValid() {
		return "", errors.New("its address is not known: give --advertise")
	}
	return net.JoinHostPort(ip.String(), port), nil
}

const maxAddr = 255

// leave takes in that a machine has gone before all were there.
func (g *gathering) leave(j *joining) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing {
		return
	}
	g.joined = slices.DeleteFunc(g.joined, func(other *joining) bool { return other == j })
	g.say(fmt.Sprintf("%s has gone; waiting for %s", j.host.Name, count(g.want-1-len(g.joined), "more machine")))
}

// assign returns what all machines are told; g.mu is held.
func (g *gathering) assign() assignment {
	a := g.first
	own := a.Hosts[0]
	a.Hosts = []host.Addr{own}
	next := a.Workers
	for i, j := range g.joined {
		j.self = i + 1
		for range cmp.Or(j.workers, g.first.Workers) {
			j.host.Workers = append(j.host.Workers, next)
			next++
		}
		a.Hosts = append(a.Hosts, j.host)
	}
	for i := range a.Hosts {
		a.Hosts[i].Voter = i < voters(len(a.Hosts))
	}
	a.Workers = next
	return a
}

// first returns how many workers the first machine has.
func (a *assignment) first() int { return len(a.Hosts[0].Workers) }

// sound reports whether an assignment can be that of a machine that joins.
func (a *assignment) sound() bool {
	place := a.Self > 0 && a.Self < len(a.Hosts) && len(a.Hosts[a.Self].Workers) > 0
	if a.Enters != nil {
		place = a.Self == 0 && machineName.MatchString(a.Enters.Name) && a.Enters.Starts > 0 && a.Enters.Starts <= session.MaxWorkers
	}
	return a.Apart && len(a.Hosts) > 0 && place && !slices.ContainsFunc(a.Hosts, func(h host.Addr) bool {
		return !machineName.MatchString(h.Name)
	})
}

// open opens a door at an address.
func (g *gathering) open(at string, f runFlags, dir *rundir.Dir) (d *door.Door, err error) {
	g.mu.Lock() // until g.door is there
	defer g.mu.Unlock()
	g.dir = dir.Path()
	g.door, err = door.Open(at, f.ports, f.advertise, dir.File(door.File), admit.Config{Secret: g.first.Secret, Handle: g.handle, Refused: func(r admit.Refusal) {
		select {
		case <-g.whole: // the run shows what happens now
		default:
			g.say(fmt.Sprintf("a caller from %v was not let in: %v", r.From, r.Cause))
		}
	}})
	return g.door, err
}

// gather opens the door for other machines, has those of --hosts come, and waits until all are there. It returns what this one is told,
// and the door, through which they fetch the program, and others join later.
func gather(f *runFlags, a assignment, v view.View, dir *rundir.Dir, stops <-chan session.Reason, others *others, stdout io.Writer) (_ assignment, d *door.Door, reason session.Reason, err error) {
	var saying sync.Mutex
	g := &gathering{
		first: a, want: f.waitHosts, least: f.over.least, whole: make(chan struct{}), short: make(chan struct{}),
		say: func(text string) {
			saying.Lock()
			defer saying.Unlock()
			v.Show(view.Note(text))
		},
	}
	if d, err = g.open(f.listen, *f, dir); err != nil {
		return a, nil, "", fmt.Errorf("--listen %s: %w", f.listen, err)
	}
	switch {
	case f.meet != nil:
		if err := f.meet.serve(dir, func(text string) {
			select {
			case <-g.whole: // as above
			default:
				g.say(text)
			}
		}); err != nil {
			return a, nil, "", errors.Join(err, d.Close())
		}
	case others != nil:
		others.begin(g, d.Ticket.Text())
	default:
		fmt.Fprintf(stdout, "on each of the other machines, now or while the run goes on, run\n%s%s\nor launcher join - < %s\n", away.Ticket, d.Ticket.Text(), filepath.Join(dir.String(), door.File))
		if err := leave(f.child, dir, stdout); err != nil {
			return a, nil, "", errors.Join(err, d.Close())
		}
	}
	if f.waitHosts == 1 {
		return g.alone(d.Ticket.Addrs), d, "", nil
	}
	g.say("waiting for " + count(f.waitHosts-1, "more machine"))
	select {
	case <-g.whole:
		return g.begun, d, "", nil
	case <-g.short:
		return a, nil, "", errors.Join(append(g.failed, d.Close())...)
	case reason := <-stops:
		return a, nil, reason, d.Close()
	}
}

// alone has the run begin on this machine, which others reach at the first of its addresses.
func (g *gathering) alone(addrs []string) assignment {
	g.mu.Lock()
	defer g.mu.Unlock()
	ip, _ := netip.ParseAddrPort(addrs[0])
	for _, addr := range []*string{&g.first.Hosts[0].Agree, &g.first.Hosts[0].Link} {
		if whole, err := addrOf(*addr, ip.Addr()); err == nil {
			*addr = whole
		}
	}
	g.closing = true
	g.begun = g.assign()
	close(g.whole)
	return g.begun
}

// trainApart trains the program on this machine and those that join.
// all are the arguments of its workers, and args those of the program.
func trainApart(ctx context.Context, f runFlags, p program, file string, args, all []string, dir *rundir.Dir, again *session.Resume, cwd string, v view.View, stops chan session.Reason, stdout, stderr io.Writer) error {
	fail := func(err error) error {
		v.Close()
		return cli.Fail(err)
	}
	settings := f.settings(p, cwd)
	settings.Resume = again
	name, _ := os.Hostname()
	a := assignment{Secret: newSecret(), Apart: true, Args: args, Settings: settings, Workers: f.workers, Chaos: f.chaos, Clocks: f.clocks, SysFS: f.sysfs, TieBreak: f.tieBreak}
	var err error
	if p.script != "" {
		reason, wrong := untilStop(ctx, stops, func(ctx context.Context) (err error) {
			if err = p.python.MakeValues(ctx, args); err == nil {
				a.Program, err = p.ship(f.python, dir)
			}
			return err
		})
		var no *torch.ValuesError
		switch {
		case reason != "":
			v.Close()
			return cli.Report(session.Outcome{Err: &session.StoppedError{Reason: reason}}, stdout, stderr)
		case errors.As(wrong, &no):
			v.Close()
			return reportValues(no, stdout, stderr)
		}
		err = wrong
	} else {
		a.Program, err = ship.Describe(file)
	}
	if err != nil {
		return fail(err)
	}
	own := host.Addr{Name: nameOf(name, nil)}
	for w := range f.workers {
		own.Workers = append(own.Workers, w)
	}
	at, port, err := net.SplitHostPort(f.listen)
	if err != nil {
		return fail(fmt.Errorf("--listen %s: give HOST:PORT or :PORT", faults.Value(f.listen)))
	}
	files, err := listenFor(&own, at, f.ports)
	defer closeAll(files)
	if err != nil {
		return fail(fmt.Errorf("--listen %s: %w", f.listen, err))
	}
	if err := advertised(&own, f.advertise); err != nil {
		return fail(err)
	}
	if err := roomFor(f.ports, f.workers, port == "0"); err != nil {
		return fail(err)
	}
	a.Hosts = []host.Addr{own}
	defer f.meet.end()
	others, err := f.over.others(ctx, f.ports)
	if err != nil {
		return fail(err)
	}
	defer others.end()
	a, d, reason, err := gather(&f, a, v, dir, stops, others, stdout)
	switch {
	case err != nil:
		return fail(err)
	case reason != "":
		v.Close()
		return cli.Report(session.Outcome{Err: &session.StoppedError{Reason: reason}}, stdout, stderr)
	}
	defer d.Close()
	a.Args = all
	return trainHere(ctx, f, a, file, dir, files, d, v, stops, stdout, stderr)
}

// reportValues prints why a Python program makes no job, or the help that its user wants, and returns what the command ends with.
func reportValues(e *torch.ValuesError, stdout, stderr io.Writer) error {
	if e.Status == 0 {
		_, err := io.WriteString(stdout, e.Text)
		return err
	}
	fmt.Fprintf(stderr, "launcher: %s\n", e.Text)
	return cli.Exit(e.Status)
}

// leave lets the command end that has detached this one.
func leave(child *detach.Child, dir *rundir.Dir, stdout io.Writer) error {
	if !child.Stays() {
		return nil
	}
	fmt.Fprintf(stdout, "%[1]s%[2]s shows it, launcher stop %[2]s ends it\n", away.Background, dir)
	return child.Leave(dir.File("log/launcher.log"))
}

// trainHere runs the agent of this machine until the run has ended.
func trainHere(ctx context.Context, f runFlags, a assignment, file string, dir *rundir.Dir, listeners []*os.File, d *door.Door, v view.View, stops chan session.Reason, stdout, stderr io.Writer) error {
	own, err := os.Executable()
	if err != nil {
		return cli.Fail(err)
	}
	s := newSupervisor(f, own, nil, v, stdout)
	s.apart = true
	if err := s.measure(ctx, f.page); err != nil {
		return cli.Fail(err)
	}
	a.Measures, a.Ports = s.board != nil, f.ports
	return s.train(dir, f.page, stops, stderr, func() error {
		if a.Settings.Resume != nil {
			if err := beginAgain(dir); err != nil {
				return err
			}
		}
		store, err := dir.MakeStore()
		if err != nil {
			return err
		}
		a.RunDir, a.Shown, a.File, a.Store = dir.Path(), dir.String(), file, filepath.Join(store, a.own().Name)
		if err := s.startAgent(a, listeners); err != nil {
			return err
		}
		s.tasks.Go(func() { s.tellRejected(&d.Rejected) })
		return leave(f.child, dir, stdout)
	})
}

// roomFor returns an error if a range has fewer ports than a machine with so many workers takes: two for the links of its agent and the
// agreement, one for the agent and each worker in the gossip ring, one for the links of each worker and, with door, one for machines
// that join.
func roomFor(in ports.Range, workers int, door bool) error {
	need := 3 + 2*workers
	if door {
		need++
	}
	if have := in.To - in.From + 1; in != (ports.Range{}) && have < need {
		return fmt.Errorf("--ports %v: %s; a machine with %s takes %d", in, count(have, "port"), count(workers, "worker"), need)
	}
	return nil
}

// advertised gives a host the address that its user chose, which it has to have.
func advertised(h *host.Addr, chosen []string) error {
	if len(chosen) == 0 {
		return nil
	}
	ip, _, err := net.SplitHostPort(chosen[0])
	if err != nil {
		ip = chosen[0]
	}
	if _, err := netip.ParseAddr(ip); err != nil {
		return fmt.Errorf("--advertise %s: give the IP address at which other machines reach this one", faults.Value(chosen[0]))
	}
	// Its workers listen there, once the run counts on them.
	l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		return fmt.Errorf("--advertise %s: this machine cannot listen there (%w): give an address of its own", faults.Value(chosen[0]), errors.Unwrap(err))
	}
	_ = l.Close()
	for _, addr := range []*string{&h.Agree, &h.Link} {
		_, port, err := net.SplitHostPort(*addr)
		if err != nil {
			return err
		}
		*addr = net.JoinHostPort(ip, port)
	}
	return nil
}

// ask sends a call to the machine at which the run began.
func ask(ctx context.Context, t admit.Ticket, c call) ([]byte, error) {
	c.Protocol, c.System = control.Protocol, system()
	request, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	reply, _, err := admit.Dial(ctx, t, request)
	return reply, err
}

// fetcher asks the machine at which the run began for a part of its program.
func fetcher(t admit.Ticket) ship.Fetcher {
	return func(ctx context.Context, part ship.Part) ([]byte, error) { return ask(ctx, t, call{Fetch: &part}) }
}

func newSecret() []byte {
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // it never fails
	return secret
}
