package devices

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/net/control"
)

// MeterEvery is the time between two looks at what devices do.
const MeterEvery = time.Second

// maxOrders bounds the messages of a leader that wait.
const maxOrders = 1 << 13

// Server has the clocks of this machine set as a leader on another one says. It is used by several goroutines.
type Server struct {
	holder *Holder
	pids   func(workers []int) map[int]int
	fault  func(error)
	signal chan struct{}

	mu     sync.Mutex
	orders []order
}

// order is what a leader says over a link; nil means that the link has ended.
type order struct {
	link any
	tell func(control.Message)
	said control.Message
}

// NewServer returns the server of a holder. pids returns the processes of those workers that are on this machine. fault is told, in the
// end, why clocks may not be as they were found.
func NewServer(h *Holder, pids func(workers []int) map[int]int, fault func(error)) *Server {
	return &Server{holder: h, pids: pids, fault: fault, signal: make(chan struct{}, 1)}
}

// Hear takes in what the leader says over a link, and reports whether that was not too much. tell answers; neither waits.
func (s *Server) Hear(link any, tell func(control.Message), m control.Message) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.orders) >= maxOrders {
		return false
	}
	s.put(order{link, tell, m})
	return true
}

// End takes in that a link has ended.
func (s *Server) End(link any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.orders = slices.DeleteFunc(s.orders, func(o order) bool { return o.link == link && o.said != nil })
	s.put(order{link: link})
}

func (s *Server) put(o order) {
	s.orders = append(s.orders, o)
	select {
	case s.signal <- struct{}{}:
	default:
	}
}

func (s *Server) next() (o order, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.orders) == 0 {
		return o, false
	}
	o = s.orders[0]
	s.orders = s.orders[1:]
	return o, true
}

// Run serves until ctx ends, and then restores all clocks.
func (s *Server) Run(ctx context.Context) {
	tick := time.NewTicker(MeterEvery)
	defer tick.Stop()
	var v service
	defer func() { s.end(&v) }()
	for {
		select {
		case <-s.signal:
			for o, ok := s.next(); ok && ctx.Err() == nil; o, ok = s.next() {
				s.serve(ctx, &v, o)
			}
		case <-tick.C:
			if len(v.devices) > 0 {
				v.tell(control.ClockState{ID: v.id, Devices: now(v.devices)})
			}
		case <-ctx.Done():
			return
		}
	}
}

// service is what one leader is served with.
type service struct {
	link    any
	tell    func(control.Message)
	held    bool
	id      uint64
	devices []Device
	places  []int // of the devices among those of the holder
}

// end restores all clocks.
func (s *Server) end(v *service) {
	if v.held {
		if err := s.holder.Release(); err != nil {
			s.fault(err)
		}
	}
	*v = service{}
}

func (s *Server) serve(ctx context.Context, v *service, o order) {
	switch m := o.said.(type) {
	case nil:
		if v.link == o.link {
			s.end(v)
		}
	case control.OpenClocks:
		if v.link != o.link {
			s.end(v)
		}
		v.link, v.tell, v.id = o.link, o.tell, m.ID
		said := control.Clocks{ID: m.ID}
		if err := s.open(ctx, v, m); err != nil {
			s.end(v)
			said.Err = err.Error()
		} else {
			said.Devices = Describe(v.devices)
			v.devices = v.devices[:len(said.Devices)]
		}
		o.tell(said)
	case control.SetClock:
		if v.link != o.link || v.id != m.ID || len(v.devices) == 0 {
			return // it is about devices of before
		}
		err := fmt.Errorf("there is no device %d", m.Device)
		if m.Device >= 0 && m.Device < len(v.devices) {
			err = s.holder.Apply([]dvfs.Setting{{Clock: v.places[m.Device], MHz: m.MHz}})
		}
		if err != nil {
			s.end(v)
			o.tell(control.ClockState{ID: m.ID, Err: err.Error()})
		}
	}
}

// open opens the devices of workers of this machine.
func (s *Server) open(ctx context.Context, v *service, m control.OpenClocks) error {
	v.devices, v.places = nil, nil
	if len(m.Workers) > control.MaxClocks {
		return fmt.Errorf("devices of %d workers are asked for, more than %d", len(m.Workers), control.MaxClocks)
	}
	if !v.held {
		if err := s.holder.Acquire(ctx); err != nil {
			return err
		}
		v.held = true
	}
	pids := s.pids(m.Workers)
	all, err := s.holder.Open(pids)
	if err != nil {
		return err
	}
	for i, d := range all {
		// Emulated devices stay when their workers have gone.
		if !slices.ContainsFunc(d.Workers, func(w int) bool { _, there := pids[w]; return !there }) {
			v.devices, v.places = append(v.devices, d), append(v.places, i)
		}
	}
	return nil
}
