package sim

import (
	"time"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
)

// pair is the two ends of a link, the lower session first.
type pair [2]id.Session

// link is the link between two sessions. It opens when both admit each other, and loses what is under way when it breaks.
type link struct {
	c     *Cluster
	ends  [2]*worker
	cuts  int
	up    bool
	life  int // counts how often it was opened or broken
	queue [2][]message
	last  [2]time.Time // arrivals, by the sending end
}

// message is what one worker sends another: keyed content, or a part of an operation of a group.
type message struct {
	from  id.Session
	key   comm.Key
	value any
	part  *part
}

// part is what a member of a group says in an operation, or, if it aborts, that the version is over.
type part struct {
	call   call
	from   id.Session
	said   any
	aborts bool
}

// call names an operation of a group, which is the same on all members.
type call struct {
	group   uint16
	version id.Version
	step    uint64
	tag     uint16
}

func (c *Cluster) link(a, b *worker) *link {
	if a.session.Compare(b.session) > 0 {
		a, b = b, a
	}
	k := pair{a.session, b.session}
	if c.links[k] == nil {
		c.links[k] = &link{c: c, ends: [2]*worker{a, b}}
	}
	return c.links[k]
}

// open reports whether the link can be up.
func (l *link) open() bool {
	a, b := l.ends[0], l.ends[1]
	return l.cuts == 0 && a.alive && b.alive && a.members[b.session] && b.members[a.session]
}

// refresh opens or breaks the link after a change.
func (l *link) refresh() {
	switch open := l.open(); {
	case open == l.up:
	case open:
		life := l.life
		l.c.after(l.c.delay(100*time.Microsecond), func() {
			if l.up || life != l.life || !l.open() {
				return
			}
			l.up = true
			l.life++
			for i, queue := range l.queue {
				l.queue[i] = nil
				for _, m := range queue {
					l.transmit(i, m)
				}
			}
			for _, w := range l.ends {
				w.linkUp()
			}
		})
	default:
		l.up = false
		l.life++
		for i, w := range l.ends {
			other := l.ends[1-i]
			if !w.members[other.session] {
				l.queue[i] = nil
				continue
			}
			l.c.after(l.c.delay(100*time.Microsecond), func() {
				if w.alive {
					w.run(func() { w.linkLost(other) })
				}
			})
		}
	}
}

// send sends a message from one end.
func (l *link) send(from *worker, m message) {
	i := 0
	if l.ends[1] == from {
		i = 1
	}
	switch {
	case !from.members[l.ends[1-i].session]:
	case l.up:
		l.transmit(i, m)
	default:
		l.queue[i] = append(l.queue[i], m)
	}
}

func (l *link) transmit(i int, m message) {
	at := l.c.now.Add(l.c.delay(200 * time.Microsecond))
	if m.part != nil && at.Before(l.last[i]) { // keyed messages may overtake each other
		at = l.last[i]
	}
	l.last[i] = at
	life, to := l.life, l.ends[1-i]
	m.from = l.ends[i].session
	l.c.At(at.Sub(time.Unix(0, 0)), func() {
		if life == l.life && to.alive {
			to.run(func() { to.receive(m) })
		}
	})
}

// post sends a message to a session.
func (w *worker) post(to id.Session, m message) {
	if x := w.c.workers[to]; x != nil && x != w {
		w.c.link(w, x).send(w, m)
	}
}

// operation is an operation of a group that this worker has begun.
type operation struct {
	call    call
	members []id.Session
	done    func(parts map[id.Session]any)
	broken  func()
}

// begin begins an operation: its own part goes to all members, and it is done when those of all have come.
func (w *worker) begin(o *operation, said any) {
	if w.aborted[o.call.group].Compare(o.call.version) >= 0 || w.groups[o.call.group].version != o.call.version {
		w.later(func() { o.broken() })
		return
	}
	w.ops = append(w.ops, o)
	for _, m := range o.members {
		if m != w.session {
			w.post(m, message{part: &part{call: o.call, from: w.session, said: said}})
		}
	}
	w.take(part{call: o.call, from: w.session, said: said})
}

// take takes a part of an operation.
func (w *worker) take(p part) {
	if w.parts[p.call] == nil {
		w.parts[p.call] = make(map[id.Session]any)
	}
	w.parts[p.call][p.from] = p.said
	for i, o := range w.ops {
		if o.call != p.call {
			continue
		}
		for _, m := range o.members {
			if _, ok := w.parts[o.call][m]; !ok {
				return
			}
		}
		w.ops = append(w.ops[:i:i], w.ops[i+1:]...)
		parts := w.parts[o.call]
		delete(w.parts, o.call)
		w.later(func() { o.done(parts) })
		return
	}
}

// abort ends a version of a group, and those before it, on all members that can be reached.
func (w *worker) abort(group uint16, version id.Version) {
	if g := w.groups[group]; w.aborted[group].Compare(version) < 0 {
		w.aborted[group] = version
		for _, m := range g.members {
			if m != w.session && g.version == version {
				w.post(m, message{part: &part{call: call{group: group, version: version}, from: w.session, aborts: true}})
			}
		}
	}
	var left []*operation
	for _, o := range w.ops {
		if o.call.group == group && o.call.version.Compare(version) <= 0 {
			w.later(func() { o.broken() })
		} else {
			left = append(left, o)
		}
	}
	w.ops = left
}
