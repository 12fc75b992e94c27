package control

import (
	"fmt"
	"reflect"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/graph"
)

// Most of what an order and an answer carry are lists of small structs. A map for each, with names, took a worker more time in a recovery than
// anything else it does there. So such a list is one array of numbers and texts, element after element.
func init() {
	flat(func(l *list, x *id.WorkerID) { l.number((*int)(x)) })
	flat(func(l *list, x *id.Range) { l.area(x) })
	flat(func(l *list, x *graph.Pair) { l.pair(x) })
	flat(func(l *list, x *graph.Status) {
		l.pair(&x.Pair)
		phase := int(x.Phase)
		l.number(&phase)
		if x.Phase = graph.Phase(phase); int(x.Phase) != phase {
			l.fail("%d is no phase", phase)
		}
		l.flag(&x.Input)
		l.flag(&x.Gradient)
	})
	flat(func(l *list, x *Filled) {
		l.area(&x.Range)
		l.number(&x.Step)
	})
	flat(func(l *list, x *plan.Worker) { l.worker(x) })
	flat(func(l *list, x *Peer) {
		l.worker(&x.Worker)
		l.text(&x.Addr)
	})
	flat(func(l *list, x *plan.Stage) {
		l.number(&x.Lo)
		l.number(&x.Hi)
		l.workers(&x.Workers)
	})
	flat(func(l *list, x *plan.Limit) {
		l.number(&x.Stage)
		l.number((*int)(&x.Worker))
		l.number(&x.Forwards)
		l.number(&x.Lead)
	})
	flat(func(l *list, x *plan.Shard) {
		l.number(&x.Layer)
		l.number(&x.Lo)
		l.number(&x.Hi)
		l.number((*int)(&x.Owner))
		l.workers(&x.Mirrors)
	})
}

// flat has lists of a type travel so. each passes those of an element to a list, and takes them from one.
func flat[T any](each func(*list, *T)) {
	msgpack.Register([]T(nil), func(enc *msgpack.Encoder, v reflect.Value) error {
		all := v.Interface().([]T)
		var count list
		for i := range all {
			each(&count, &all[i])
		}
		l := list{enc: enc, err: enc.EncodeArrayLen(count.n)}
		for i := range all {
			each(&l, &all[i])
		}
		return l.err
	}, func(dec *msgpack.Decoder, v reflect.Value) error {
		n, err := dec.DecodeArrayLen()
		if err != nil || n <= 0 {
			return err
		}
		l := list{dec: dec, n: n}
		var all []T
		for l.n > 0 && l.err == nil {
			var x T
			each(&l, &x)
			if all == nil {
				all = make([]T, 0, 1+l.n/(n-l.n)) // elements with lists of their own may be longer
			}
			all = append(all, x)
		}
		*v.Addr().Interface().(*[]T) = all
		return l.err
	})
}

// list is one on its way: its numbers and texts are counted, put into an encoder, or taken from a decoder.
type list struct {
	enc *msgpack.Encoder
	dec *msgpack.Decoder
	n   int // counted so far, or left to take
	err error
}

// next reports whether one more is to be put or taken.
func (l *list) next() bool {
	switch {
	case l.err != nil:
	case l.enc != nil:
		return true
	case l.dec == nil:
		l.n++
	case l.n == 0:
		l.fail("a list ends within an element")
	default:
		l.n--
		return true
	}
	return false
}

func (l *list) number(n *int) {
	switch {
	case !l.next():
	case l.enc != nil:
		l.err = l.enc.EncodeInt(int64(*n))
	default:
		*n, l.err = l.dec.DecodeInt()
	}
}

func (l *list) text(s *string) {
	switch {
	case !l.next():
	case l.enc != nil:
		l.err = l.enc.EncodeString(*s)
	default:
		*s, l.err = l.dec.DecodeString()
	}
}

func (l *list) fail(format string, args ...any) {
	if l.err == nil {
		l.err = fmt.Errorf(format, args...)
	}
}

func (l *list) flag(b *bool) {
	n := 0
	if *b {
		n = 1
	}
	l.number(&n)
	*b = n != 0
}

func (l *list) pair(p *graph.Pair) {
	l.number(&p.Stage)
	l.number(&p.Micro)
}

func (l *list) worker(w *plan.Worker) {
	l.number((*int)(&w.ID))
	l.number(&w.Incarnation)
	l.text(&w.Host)
}

func (l *list) area(r *id.Range) {
	l.number(&r.Layer)
	l.number(&r.Lo)
	l.number(&r.Hi)
}

// workers puts or takes how many there are, and these.
func (l *list) workers(ids *[]id.WorkerID) {
	n := len(*ids)
	l.number(&n)
	if l.dec != nil {
		if n < 0 || n > l.n {
			l.fail("%d workers in the %d numbers that are left of a list", n, l.n)
			return
		}
		*ids = nil
		if n > 0 {
			*ids = make([]id.WorkerID, n)
		}
	}
	for i := range *ids {
		l.number((*int)(&(*ids)[i]))
	}
}
