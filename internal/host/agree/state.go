package agree

import (
	"bufio"
	"fmt"
	"io"
	"slices"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/soliton-train/soliton/internal/id"
)

// Bounds of a [State].
const (
	MaxPlans     = 32       // plans kept whole
	MaxPlanBytes = 32 << 20 // of all plans kept but the newest
	MaxServers   = 1 << 10
	MaxMembers   = 1 << 10 // that have joined since the run began
	MaxSkips     = 1 << 16 // samples that are skipped
)

// State is what is agreed. It is a value: whoever has one may keep it, and must
// not change what its slices hold. The zero State is that of a new job.
type State struct {
	Index  uint64 // of the last entry that is in it
	Term   uint64 // of the newest leadership
	Leader string // the node that had it; "" before the first

	Generation int // starts of the job
	Job        Job // the newest; its Generation is 0 before the first

	Newest id.Version // of all plans; never falls
	// Plans are the first plan of this generation and the newest ones, the newest last: at most MaxPlans. Earlier
	// counts the others.
	Plans   []Plan
	Earlier int

	Servers []Server // of the newest committed configuration, by ID
	Skips   []Skip   // of this generation, in this order
	Members []Member // that have joined since this generation began, in this order; the newest entry of each name
}

// Apply returns the state after an entry with this place and term in the log. If
// the entry is refused, the error is a [RefusedError], and the state is s but
// for its index.
func (s State) Apply(index, term uint64, e Entry) (State, error) {
	s.Index = index
	next := s
	var err error
	switch e := e.(type) {
	case Generation:
		err = next.generation(e)
	case Job:
		err = next.job(e)
	case Plan:
		err = next.plan(e, term)
	case Member:
		err = next.member(e)
	case Skip:
		err = next.skip(e, term)
	case Servers:
		next.Servers = e.Servers
	case Leader:
		next.Term, next.Leader = term, e.ID
	default:
		err = &RefusedError{Entry: fmt.Sprintf("%T", e), Class: ErrInvalid, Why: "unknown kind"}
	}
	if err != nil {
		return s, err
	}
	return next, nil
}

func (s *State) generation(e Generation) error {
	if e.N <= s.Generation {
		return refused(e, ErrStale, "the newest is %d", s.Generation)
	}
	s.Generation, s.Members, s.Skips = e.N, nil, nil
	return nil
}

func (s *State) job(e Job) error {
	switch {
	case e.Generation < s.Generation:
		return refused(e, ErrStale, "the newest generation is %d", s.Generation)
	case e.Generation > s.Generation || e.Generation < 1:
		return refused(e, ErrInvalid, "the newest generation is %d", s.Generation)
	case s.Job.Generation == e.Generation:
		return refused(e, ErrStale, "this generation has its job")
	}
	s.Job = e
	return nil
}

func (s *State) plan(e Plan, term uint64) error {
	switch {
	case e.Term != 0 && e.Term != term:
		return refused(e, ErrStale, "it was made in term %d, and this is %d", e.Term, term)
	case e.Version.Generation < 1 || e.Version.N < 1:
		return refused(e, ErrInvalid, "versions count from 1.1")
	case e.Version.Generation > s.Generation:
		return refused(e, ErrInvalid, "the newest generation is %d", s.Generation)
	case e.Version.Generation < s.Generation:
		return refused(e, ErrStale, "the newest generation is %d", s.Generation)
	case e.Version.Compare(s.Newest) <= 0:
		return refused(e, ErrStale, "the newest plan is %v", s.Newest)
	}
	s.Newest = e.Version
	plans := append(slices.Clone(s.Plans), e)
	first := slices.IndexFunc(plans, func(p Plan) bool { return p.Version.Generation == e.Version.Generation })
	kept, size := 1, len(plans[first].Data)
	for ; kept < len(plans)-first-1 && kept < MaxPlans-1; kept++ {
		if size += len(plans[len(plans)-1-kept].Data); size > MaxPlanBytes && kept > 1 {
			break // which plan is live follows from the newest two
		}
	}
	was := len(plans)
	if first < len(plans)-1 {
		plans = append([]Plan{plans[first]}, plans[len(plans)-kept:]...)
	} else {
		plans = []Plan{e}
	}
	s.Earlier += was - len(plans)
	s.Plans = plans
	return nil
}

func (s *State) member(e Member) error {
	if e.Name == "" || e.Agree == "" || e.Link == "" || e.Workers < 0 {
		return refused(e, ErrInvalid, "it lacks a name or an address, or has %d workers", e.Workers)
	}
	hosts := slices.Clone(s.Members)
	i := slices.IndexFunc(hosts, func(h Member) bool { return h.Name == e.Name })
	switch {
	case i >= 0:
		hosts[i] = e
	case len(hosts) >= MaxMembers:
		return refused(e, ErrInvalid, "%d have joined", len(hosts))
	default:
		hosts = append(hosts, e)
	}
	s.Members = hosts
	return nil
}

func (s *State) skip(e Skip, term uint64) error {
	switch {
	case e.Term != 0 && e.Term != term:
		return refused(e, ErrStale, "it was made in term %d, and this is %d", e.Term, term)
	case e.Skips < 0 || len(s.Skips) >= MaxSkips:
		return refused(e, ErrInvalid, "%d were skipped there before, and %d in all", e.Skips, len(s.Skips))
	case slices.ContainsFunc(s.Skips, func(x Skip) bool { return x.Sample == e.Sample && x.Skips == e.Skips }):
		return refused(e, ErrStale, "it is skipped already")
	}
	s.Skips = append(slices.Clone(s.Skips), e)
	return nil
}

// Skipped returns the samples of Skips.
func (s State) Skipped() (all []uint64) {
	for _, e := range s.Skips {
		all = append(all, e.Sample)
	}
	return all
}

// Server returns a server by its ID.
func (s State) Server(id string) (Server, bool) {
	i := slices.IndexFunc(s.Servers, func(v Server) bool { return v.ID == id })
	if i < 0 {
		return Server{}, false
	}
	return s.Servers[i], true
}

// code writes or reads a snapshot.
func (s *State) code(c *coder) {
	c.uint(&s.Index)
	c.uint(&s.Term)
	c.text(&s.Leader, MaxName)
	c.int(&s.Generation)
	s.Job = s.Job.code(c).(Job)
	c.int(&s.Newest.Generation)
	c.int(&s.Newest.N)
	c.int(&s.Earlier)
	c.count(len(s.Plans), MaxPlans, func(i int) {
		if i == len(s.Plans) { // reading
			s.Plans = append(s.Plans, Plan{})
		}
		s.Plans[i] = s.Plans[i].code(c).(Plan)
	})
	c.count(len(s.Members), MaxMembers, func(i int) {
		if i == len(s.Members) {
			s.Members = append(s.Members, Member{})
		}
		s.Members[i] = s.Members[i].code(c).(Member)
	})
	c.count(len(s.Skips), MaxSkips, func(i int) {
		if i == len(s.Skips) {
			s.Skips = append(s.Skips, Skip{})
		}
		s.Skips[i] = s.Skips[i].code(c).(Skip)
	})
	s.Servers = Servers{s.Servers}.code(c).(Servers).Servers
}

// Write writes a snapshot.
func (s State) Write(w io.Writer) error {
	b := bufio.NewWriter(w)
	_ = b.WriteByte(format) // Flush returns its error
	// Writing takes the fields as they are; nothing else changes this copy.
	c := coder{enc: msgpack.NewEncoder(b)}
	s.Plans, s.Members, s.Skips = slices.Clone(s.Plans), slices.Clone(s.Members), slices.Clone(s.Skips)
	s.code(&c)
	if c.err != nil {
		return fmt.Errorf("agree: snapshot: %w", c.err)
	}
	return b.Flush()
}

// maxSnapshot bounds what is read of a snapshot, in bytes.
const maxSnapshot = 1 << 30

// ReadState reads a snapshot.
func ReadState(r io.Reader) (State, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxSnapshot))
	if err != nil {
		return State{}, err
	}
	if len(text) == 0 || text[0] != format {
		return State{}, fmt.Errorf("agree: snapshot is not of format %d", format)
	}
	var s State
	c := newReader(text[1:])
	s.code(c)
	if err := c.end(); err != nil {
		return State{}, fmt.Errorf("agree: snapshot: %w", err)
	}
	return s, nil
}
