package host

import (
	"context"
	"fmt"
	"testing"

	"github.com/soliton-train/soliton/internal/net/control"
)

// What an agent tells a new leader of its worker.
func TestAccount(t *testing.T) {
	r := &relay{locals: []*local{{id: 3, hello: []byte("h"), ready: []byte("r"), done: []byte("d"), closed: true, exit: &control.Exited{Worker: 3, Text: "x"}}}}
	for _, s := range []reported{{1, 1, nil}, {1, 2, nil}, {2, 3, nil}, {4, 1, nil}, {4, 2, nil}} {
		s.body = []byte(fmt.Sprintf("%d.%d", s.plan, s.step))
		r.locals[0].steps = append(r.locals[0].steps, s)
	}
	for _, c := range []struct {
		since control.Lead
		want  string
	}{
		{control.Lead{}, "h r 1.1 1.2 2.3 4.1 4.2 d closed exited told"},
		{control.Lead{Plan: 2, Step: 3}, "h r 4.1 4.2 d closed exited told"},
		{control.Lead{Plan: 3, Step: 9}, "h r 4.1 4.2 d closed exited told"},
		{control.Lead{Plan: 4, Step: 2}, "h r 4.2 d closed exited told"},
	} {
		q := newQueue[control.Message]()
		r.account(q, c.since)
		q.close()
		got := ""
		for m, ok := q.take(context.Background()); ok; m, ok = q.take(context.Background()) {
			switch m := m.(type) {
			case control.Relayed:
				got += string(m.Message) + " "
			case control.Closed:
				got += "closed "
			case control.Exited:
				got += "exited "
			case control.Told:
				got += "told"
			}
		}
		if got != c.want {
			t.Errorf("since %+v: %s, want %s", c.since, got, c.want)
		}
	}
}

func TestQueue(t *testing.T) {
	q := newQueue[int]()
	ctx, cancel := context.WithCancel(t.Context())
	sum := make(chan int)
	go func() {
		n := 0
		for v, ok := q.take(ctx); ok; v, ok = q.take(ctx) {
			n += v
		}
		sum <- n
	}()
	for i := range 100 {
		q.put(i)
	}
	q.close()
	q.put(1000)
	if n := <-sum; n != 4950 {
		t.Errorf("sum %d", n)
	}
	cancel()
	if _, ok := newQueue[int]().take(ctx); ok {
		t.Error("a value of an empty queue")
	}
}
