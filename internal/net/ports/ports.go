// Package ports chooses where a machine listens whose firewall lets only some ports through.
package ports

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"syscall"
)

// Range is a range of ports. The zero value leaves the choice to the system. It is a flag's value, FROM-TO.
type Range struct {
	From int `json:"from"`
	To   int `json:"to"` // the last one
}

const last = 1<<16 - 1

// Set implements [flag.Value].
func (r *Range) Set(text string) error {
	if text == "" {
		*r = Range{}
		return nil
	}
	from, to, ok := strings.Cut(text, "-")
	if !ok {
		to = from
	}
	a, errA := strconv.Atoi(from)
	b, errB := strconv.Atoi(to)
	if errA != nil || errB != nil || a < 1 || a > b || b > last {
		return fmt.Errorf("give FROM-TO, such as 20000-20099, of 1 to %d", last)
	}
	*r = Range{a, b}
	return nil
}

// String implements [flag.Value].
func (r Range) String() string {
	if r == (Range{}) {
		return ""
	}
	return fmt.Sprintf("%d-%d", r.From, r.To)
}

// Type is what pflag shows of the value.
func (r Range) Type() string { return "range" }

// Listen calls listen with ports of the range, from one on that chance picks, until it returns another error than that the port is
// in use. With the zero value it calls listen once, with port 0.
func (r Range) Listen(listen func(port int) error) error {
	if r == (Range{}) {
		return listen(0)
	}
	n := r.To - r.From + 1
	first := rand.IntN(n)
	for i := range n {
		if err := listen(r.From + (first+i)%n); !errors.Is(err, syscall.EADDRINUSE) {
			return err
		}
	}
	return fmt.Errorf("all ports of --ports %v are in use", r)
}
