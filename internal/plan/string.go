package plan

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/soliton-train/soliton/internal/id"
)

// String renders the plan for people, in several lines.
func (p *Plan) String() string {
	var b strings.Builder
	kind := "from step"
	if p.InStep {
		kind = "in step"
	}
	fmt.Fprintf(&b, "plan %v %s %d: %s, %s, %s, %s per shard\n", p.Version, kind, p.FromStep,
		Count(len(p.Workers), "worker"), Count(len(p.Stages), "stage"), Count(p.Micros(), "micro-batch"), Count(p.Mirrors, "mirror"))
	type load struct{ owned, mirrored int }
	loads := make(map[id.WorkerID]load)
	for _, s := range p.Shards {
		l := loads[s.Owner]
		l.owned += s.Hi - s.Lo
		loads[s.Owner] = l
		for _, m := range s.Mirrors {
			l := loads[m]
			l.mirrored += s.Hi - s.Lo
			loads[m] = l
		}
	}
	for i, s := range p.Stages {
		fmt.Fprintf(&b, "stage %d, layers %s\n", i, span(s.Lo, s.Hi))
		for _, id := range s.Workers {
			var micros []int
			if i < len(p.Route) {
				for m, w := range p.Route[i] {
					if w == id {
						micros = append(micros, m)
					}
				}
			}
			w, _ := p.Worker(id)
			fmt.Fprintf(&b, "  worker %d", id)
			if w.Host != "" {
				fmt.Fprintf(&b, " on %s", w.Host)
			}
			fmt.Fprintf(&b, ": micro-batches %s, %d in flight, ", cmp.Or(Ranges(micros, " "), "none"), p.Limit(i, id).Forwards)
			if lead := p.Limit(i, id).Lead; lead > 0 {
				fmt.Fprintf(&b, "forward first up to %d, ", lead)
			}
			fmt.Fprintf(&b, "owns %d parameters, mirrors %d\n", loads[id].owned, loads[id].mirrored)
		}
	}
	if len(p.Settled) > 0 {
		fmt.Fprintf(&b, "%d of %d passes need not run again\n", len(p.Settled), len(p.Stages)*p.Micros())
	}
	return b.String()
}

// Count prints a number of things, such as "1 layer" or "2 layers".
func Count(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "ch"), strings.HasSuffix(what, "ss"):
		return fmt.Sprintf("%d %ses", n, what)
	default:
		return fmt.Sprintf("%d %ss", n, what)
	}
}

// span renders [lo, hi) as "3-5" or "3".
func span(lo, hi int) string {
	if hi-lo == 1 {
		return fmt.Sprint(lo)
	}
	return fmt.Sprintf("%d-%d", lo, hi-1)
}

// Ranges prints ascending numbers in short, as in 0-3,8 with a comma between.
func Ranges(n []int, between string) string {
	var parts []string
	for lo := 0; lo < len(n); {
		hi := lo + 1
		for hi < len(n) && n[hi] == n[hi-1]+1 {
			hi++
		}
		parts = append(parts, span(n[lo], n[hi-1]+1))
		lo = hi
	}
	return strings.Join(parts, between)
}
