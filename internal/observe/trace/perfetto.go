package trace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"
)

// perfettoEvent is one of the Chrome trace event format, which Perfetto opens. Times are in microseconds.
type perfettoEvent struct {
	Phase string         `json:"ph"`
	Name  string         `json:"name"`
	Cat   string         `json:"cat,omitempty"`
	TS    float64        `json:"ts"`
	Dur   *float64       `json:"dur,omitempty"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	ID    string         `json:"id,omitempty"`
	Bind  string         `json:"bp,omitempty"`
	Scope string         `json:"s,omitempty"`
	Args  map[string]any `json:"args,omitempty"`
}

// Perfetto writes spans in the Chrome trace event format: a track for each worker with its passes, or one for each lane of those that run side by side, one for
// what it has under way on the network beside it, boundary tensors as flows from pass to pass, and the
// recoveries as marks over all and on a track of the agent.
func Perfetto(w io.Writer, spans []Span) error {
	spans = slices.Clone(spans)
	slices.SortStableFunc(spans, func(a, b Span) int { return a.Start.Compare(b.Start) })
	out := bufio.NewWriter(w)
	first := true
	var failed error
	put := func(e perfettoEvent) {
		text, err := json.Marshal(e)
		if err != nil {
			failed = err
			return
		}
		sep := ",\n"
		if first {
			sep, first = "", false
		}
		_, _ = out.WriteString(sep) // Flush tells
		_, _ = out.Write(text)
	}
	_, _ = out.WriteString("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")
	var zero time.Time
	if len(spans) > 0 {
		zero = spans[0].Start
	}
	at := func(t time.Time) float64 { return float64(t.Sub(zero)) / 1000 }
	named := make(map[int]bool)
	recoveries, reliefs := make(map[ID]int), 0
	passes := make(map[tensor]*Span) // by what they make: the newest
	flows := 0
	for i := range spans {
		s := &spans[i]
		pid := s.Worker + 1 // 0 is the agent
		if !named[pid] {
			named[pid] = true
			name := fmt.Sprintf("worker %d", s.Worker)
			if s.Worker == Agent {
				name = "agent"
			}
			put(perfettoEvent{Phase: "M", Name: "process_name", PID: pid, Args: map[string]any{"name": name}})
			put(perfettoEvent{Phase: "M", Name: "process_sort_index", PID: pid, Args: map[string]any{"sort_index": pid}})
			put(perfettoEvent{Phase: "M", Name: "thread_name", PID: pid, TID: 0, Args: map[string]any{"name": name}})
		}
		dur := float64(s.End.Sub(s.Start)) / 1000
		slice := perfettoEvent{Phase: "X", Name: s.title(), Cat: s.Name, TS: at(s.Start), Dur: &dur, PID: pid, Args: s.args()}
		switch {
		case s.Name == Recovery, s.Name == Relief:
			if _, ok := recoveries[s.Trace]; !ok {
				row := len(recoveries) + 1
				if s.Name == Relief { // all in one row: there is one at a time
					if reliefs == 0 {
						reliefs = row
					}
					row = reliefs
				}
				recoveries[s.Trace] = row
			}
			slice.TID = recoveries[s.Trace]
			put(slice)
			if s.Name == Relief {
				break
			}
			put(perfettoEvent{Phase: "i", Name: s.title(), Cat: Recovery, TS: at(s.Start), PID: pid, Scope: "g", Args: slice.Args})
			put(perfettoEvent{Phase: "i", Name: "resumed", Cat: Recovery, TS: at(s.End), PID: pid, Scope: "g"})
		case s.Worker == Agent && slices.Contains(Phases[:], s.Name) && recoveries[s.Trace] > 0:
			slice.TID = recoveries[s.Trace]
			put(slice)
		case s.Worker != Agent && (doing(s.Name) <= computing || s.Name == Last):
			slice.TID = s.Int(KeyLane, 0) // slices of one row must not overlap
			put(slice)
		case s.Name == Arrive:
		default: // these overlap
			id := fmt.Sprintf("%d", i)
			put(perfettoEvent{Phase: "b", Name: s.title(), Cat: s.Name, TS: at(s.Start), PID: pid, ID: id, Args: s.args()})
			put(perfettoEvent{Phase: "e", Name: s.title(), Cat: s.Name, TS: at(s.End), PID: pid, ID: id})
		}
		if s.Name != Forward && s.Name != Backward {
			continue
		}
		stage, micro := s.Int(KeyStage, -1), s.Int(KeyMicro, -1)
		makes, needs := tensor{s.Trace, stage + 1, micro, false, 0}, tensor{s.Trace, stage, micro, false, 0}
		if s.Name == Backward {
			makes, needs = tensor{s.Trace, stage, micro, true, 0}, tensor{s.Trace, stage + 1, micro, true, 0}
		}
		passes[makes] = s
		if p := passes[needs]; p != nil && p.Worker != s.Worker && !p.End.After(s.Start) {
			flows++
			id := fmt.Sprintf("f%d", flows)
			put(perfettoEvent{Phase: "s", Name: Transfer, Cat: "flow", TS: at(p.Start) + float64(p.End.Sub(p.Start))/2000, PID: p.Worker + 1, TID: p.Int(KeyLane, 0), ID: id})
			put(perfettoEvent{Phase: "f", Name: Transfer, Cat: "flow", TS: at(s.Start) + dur/2, PID: pid, TID: s.Int(KeyLane, 0), ID: id, Bind: "e"})
		}
	}
	_, _ = out.WriteString("\n]}\n")
	if failed != nil {
		return failed
	}
	return out.Flush()
}

// title is what a span is called in a drawing.
func (s *Span) title() string {
	stage, micro, layer := s.Int(KeyStage, -1), s.Int(KeyMicro, -1), s.Int(KeyLayer, -1)
	switch {
	case s.Name == Recovery, s.Name == Relief:
		return s.Name + ": " + s.Text(KeyCause)
	case s.Name == Forward:
		return fmt.Sprintf("F%d stage %d", micro, stage)
	case s.Name == Backward:
		return fmt.Sprintf("B%d stage %d", micro, stage)
	case s.Name == Step && s.Int(KeyStep, 0) > 0:
		return fmt.Sprintf("step %d", s.Int(KeyStep, 0))
	case micro >= 0:
		return fmt.Sprintf("%s %d", s.Name, micro)
	case layer >= 0:
		return fmt.Sprintf("%s layer %d", s.Name, layer)
	}
	return s.Name
}

func (s *Span) args() map[string]any {
	args := map[string]any{"trace": s.Trace.String()}
	for _, a := range s.Attrs {
		args[a.Key] = a.Value
	}
	if s.Error != "" {
		args["error"] = s.Error
	}
	return args
}
