package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"html"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// traceEvent has every field of the Trace Event Format that a file of ours may use. Which kinds of events
// must have which is in checkTraceEvents.
type traceEvent struct {
	Ph   string         `json:"ph"`
	Name string         `json:"name"`
	Cat  string         `json:"cat"`
	TS   *float64       `json:"ts"`
	Dur  *float64       `json:"dur"`
	PID  *int           `json:"pid"`
	TID  *int           `json:"tid"`
	ID   string         `json:"id"`
	BP   string         `json:"bp"`
	S    string         `json:"s"`
	Args map[string]any `json:"args"`
}

func (e traceEvent) end() float64 {
	if e.Dur == nil {
		return *e.TS
	}
	return *e.TS + *e.Dur
}

type traceTrack struct{ pid, tid int }

func readTraceEvents(t *testing.T, file []byte) []traceEvent {
	t.Helper()
	var doc struct {
		Unit   string       `json:"displayTimeUnit"`
		Events []traceEvent `json:"traceEvents"`
	}
	in := json.NewDecoder(bytes.NewReader(file))
	in.DisallowUnknownFields()
	if err := in.Decode(&doc); err != nil {
		t.Fatalf("%v\n%.300s", err, file)
	}
	if doc.Unit != "ms" && doc.Unit != "ns" {
		t.Errorf("displayTimeUnit %q", doc.Unit)
	}
	return doc.Events
}

// checkTraceEvents holds a file against the rules of the Trace Event Format for JSON, as its definition and
// Perfetto's importer have them, and against what a run of so many workers has to show.
func checkTraceEvents(t *testing.T, file []byte, workers int) {
	t.Helper()
	events := readTraceEvents(t, file)
	const eps = 1e-3 // a nanosecond, which is what importers keep
	tracks := make(map[traceTrack][]traceEvent)
	open := make(map[string]traceEvent)
	begun, flows, steps := make(map[string]traceEvent), make(map[string]traceEvent), 0
	names := make(map[int]string)
	kinds := make(map[string]int)
	bad := func(e traceEvent, why string) { t.Errorf("%s: %+v", why, e) }
	finite := func(x *float64) bool { return x != nil && *x >= 0 && !math.IsInf(*x, 0) }
	for _, e := range events {
		kinds[e.Ph]++
		if e.PID == nil || e.TID == nil || e.Name == "" || !finite(e.TS) {
			bad(e, "no process, thread, name or time")
			continue
		}
		if (e.Dur != nil) != (e.Ph == "X") || (e.ID != "") != strings.Contains("b e s f", e.Ph) || (e.S != "") != (e.Ph == "i") || (e.BP != "") != (e.Ph == "f") {
			bad(e, "fields of another kind of event, or not its own")
		}
		if e.Cat == "" && e.Ph != "M" {
			bad(e, "no category")
		}
		key := e.Cat + "\x00" + e.ID
		switch e.Ph {
		case "M":
			switch e.Name {
			case "process_name", "thread_name":
				if name, ok := e.Args["name"].(string); !ok || name == "" {
					bad(e, "metadata without a name")
				} else if e.Name == "process_name" {
					if names[*e.PID] != "" {
						bad(e, "a process is named twice")
					}
					names[*e.PID] = name
				}
			case "process_sort_index":
				if _, ok := e.Args["sort_index"].(float64); !ok {
					bad(e, "no index")
				}
			default:
				bad(e, "unknown metadata")
			}
		case "X":
			if !finite(e.Dur) {
				bad(e, "no duration")
				continue
			}
			at := traceTrack{*e.PID, *e.TID}
			tracks[at] = append(tracks[at], e)
		case "b":
			if _, twice := begun[key]; twice {
				bad(e, "its identity is another one's")
			}
			begun[key], open[key] = e, e
		case "e":
			if b, ok := open[key]; !ok || b.Name != e.Name || *b.PID != *e.PID || *e.TS < *b.TS {
				bad(e, "ends what has not begun")
			}
			delete(open, key)
		case "s":
			if _, twice := flows[key]; twice {
				bad(e, "its identity is another one's")
			}
			flows[key] = e
		case "f":
			if s, ok := flows[key]; !ok || s.Name != e.Name || *e.TS < *s.TS || e.BP != "e" || *s.PID == *e.PID {
				bad(e, "a flow that ends has not begun, or elsewhere")
			}
			steps++
		case "i":
			if e.S != "g" && e.S != "p" && e.S != "t" {
				bad(e, "no scope")
			}
		default:
			bad(e, "unknown kind")
		}
	}
	for _, e := range open {
		bad(e, "never ends")
	}
	for _, all := range tracks {
		nested(t, all, eps)
	}
	// Both ends of a flow bind to the slice around them.
	for _, e := range events {
		if e.Ph != "s" && e.Ph != "f" {
			continue
		}
		within := false
		for _, x := range tracks[traceTrack{*e.PID, *e.TID}] {
			within = within || *x.TS <= *e.TS+eps && *e.TS <= x.end()+eps
		}
		if !within {
			bad(e, "no slice to bind to")
		}
	}
	if steps != len(flows) || steps > 0 && kinds["s"] != kinds["f"] {
		t.Errorf("%d flows begin and %d end", len(flows), steps)
	}
	if names[0] != "agent" {
		t.Errorf("process 0 is %q", names[0])
	}
	for w := range workers {
		if names[w+1] != fmt.Sprintf("worker %d", w) {
			t.Errorf("process %d is %q", w+1, names[w+1])
		}
	}
	for e := range maps.Values(names) {
		if e == "" {
			t.Error("a process has no name")
		}
	}
}

// nested fails unless the slices of a track lie within each other or apart.
func nested(t *testing.T, all []traceEvent, eps float64) {
	t.Helper()
	slices.SortStableFunc(all, func(a, b traceEvent) int { return cmp.Or(cmp.Compare(*a.TS, *b.TS), cmp.Compare(b.end(), a.end())) })
	var stack []traceEvent
	for _, e := range all {
		for len(stack) > 0 && stack[len(stack)-1].end() <= *e.TS+eps {
			stack = stack[:len(stack)-1]
		}
		if len(stack) > 0 && e.end() > stack[len(stack)-1].end()+eps {
			t.Errorf("%q (%v to %v) overlaps %q (until %v)", e.Name, *e.TS, e.end(), stack[len(stack)-1].Name, stack[len(stack)-1].end())
		}
		stack = append(stack, e)
	}
}

// drawTrace draws what a viewer shows of a file around its first recovery: the picture of the documentation.
func drawTrace(t *testing.T, file []byte) string {
	t.Helper()
	events := readTraceEvents(t, file)
	i := slices.IndexFunc(events, func(e traceEvent) bool { return e.Ph == "X" && e.Cat == "recovery" })
	if i < 0 {
		t.Fatal("there is no recovery in the file")
	}
	mark := events[i]
	from, to := *mark.TS-.5*max(*mark.Dur, 4e4), mark.end()+.7*max(*mark.Dur, 4e4)
	const left, width, lane = 86.0, 1000.0, 17.0
	x := func(ts float64) float64 { return left + (min(max(ts, from), to)-from)/(to-from)*width }
	colour := map[string]string{
		"forward": "#4c6ef5", "backward": "#0b8a6f", "check": "#c77700", "update": "#c77700", "gather": "#adb5bd", "last task": "#e03131", "recovery": "#ffc9c9",
		"detect": "#e8590c", "query": "#c77700", "plan": "#5f3dc4", "agree": "#3b5bdb", "edit": "#1098ad", "resume": "#2b8a3e", "reduce": "#d0bfff", "transfer": "#ffd8a8",
		"commit": "#ffe066", "step": "#dee2e6", "stage": "#e9ecef",
	}
	var b strings.Builder
	y := 34.0
	rows := make(map[traceTrack]float64)
	box := func(e traceEvent, until, y, h float64) {
		if until < from || *e.TS > to {
			return
		}
		w := max(x(until)-x(*e.TS), 0.8)
		fmt.Fprintf(&b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"><title>%s</title></rect>`, x(*e.TS), y, w, h, cmp.Or(colour[e.Cat], "#ced4da"), html.EscapeString(e.Name))
		name := e.Name
		if e.Cat == "forward" || e.Cat == "backward" {
			name, _, _ = strings.Cut(name, " ")
		}
		if fits := int(w / 6.4); e.Cat == "recovery" && fits > 9 {
			name = name[:min(fits, len(name))]
		}
		if w > 6.3*float64(len(name)) {
			ink := "#fff"
			if slices.Contains([]string{"recovery", "reduce", "transfer", "commit", "step", "stage", "gather"}, e.Cat) {
				ink = "#212529"
			}
			fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" fill="%s">%s</text>`, x(*e.TS)+3, y+h-4, ink, html.EscapeString(name))
		}
		b.WriteByte('\n')
	}
	processes := make(map[int]string)
	for _, e := range events {
		if e.Ph == "M" && e.Name == "process_name" {
			processes[*e.PID] = e.Args["name"].(string)
		}
	}
	for _, pid := range slices.Sorted(maps.Keys(processes)) {
		fmt.Fprintf(&b, `<text x="4" y="%.1f" fill="#212529">%s</text>`+"\n", y+lane-4, processes[pid])
		rows[traceTrack{pid, 0}] = y
		var stack []traceEvent
		deepest := 0
		all := slices.DeleteFunc(slices.Clone(events), func(e traceEvent) bool { return e.Ph != "X" || *e.PID != pid || e.end() < from || *e.TS > to })
		slices.SortStableFunc(all, func(a, b traceEvent) int { return cmp.Or(cmp.Compare(*a.TS, *b.TS), cmp.Compare(b.end(), a.end())) })
		for _, e := range all {
			for len(stack) > 0 && stack[len(stack)-1].end() <= *e.TS+1e-3 {
				stack = stack[:len(stack)-1]
			}
			box(e, e.end(), y+lane*float64(len(stack)), lane-2)
			stack = append(stack, e)
			deepest = max(deepest, len(stack))
		}
		y += lane * float64(max(deepest, 1))
		// What overlaps lies below, in as many lanes as it takes.
		var free []float64
		begun := make(map[string]traceEvent)
		for _, e := range events {
			if e.Ph == "b" {
				begun[e.Cat+e.ID] = e
			}
			s, ok := begun[e.Cat+e.ID]
			if e.Ph != "e" || !ok || *e.PID != pid || *e.TS < from || *s.TS > to || !slices.Contains([]string{"reduce", "transfer", "commit"}, e.Cat) {
				continue
			}
			n := slices.IndexFunc(free, func(until float64) bool { return until <= *s.TS })
			if n < 0 {
				if n = len(free); n == 4 {
					continue
				}
				free = append(free, 0)
			}
			free[n] = *e.TS
			box(s, *e.TS, y+12*float64(n), 10)
		}
		y += 12*float64(len(free)) + 12
	}
	starts := make(map[string]traceEvent)
	for _, e := range events {
		switch {
		case e.Ph == "s":
			starts[e.ID] = e
		case e.Ph == "f" && *starts[e.ID].TS >= from && *e.TS <= to:
			s := starts[e.ID]
			x1, y1, x2, y2 := x(*s.TS), rows[traceTrack{*s.PID, 0}]+lane/2, x(*e.TS), rows[traceTrack{*e.PID, 0}]+lane/2
			fmt.Fprintf(&b, `<path d="M%.1f %.1fC%.1f %.1f %.1f %.1f %.1f %.1f" fill="none" stroke="#868e96" stroke-width=".8" marker-end="url(#a)"/>`+"\n", x1, y1, x1+14, y1, x2-14, y2, x2, y2)
		case e.Ph == "i" && *e.TS >= from && *e.TS <= to:
			fmt.Fprintf(&b, `<path d="M%.1f 22V%.1f" stroke="#e03131" stroke-dasharray="4 3"/><text x="%.1f" y="18" fill="#e03131">%s</text>`+"\n", x(*e.TS), y, x(*e.TS)+3, html.EscapeString(cmp.Or(map[bool]string{true: "death"}[e.Name != "resumed"], e.Name)))
		}
	}
	tick := 1e3 // of time since the death
	for (to-from)/tick > 12 {
		tick *= 2
	}
	for n := math.Ceil((from - *mark.TS) / tick); *mark.TS+n*tick < to; n++ {
		at := x(*mark.TS + n*tick)
		fmt.Fprintf(&b, `<path d="M%.1f %.1fv5" stroke="#868e96"/><text x="%.1f" y="%.1f" fill="#868e96">%.0f ms</text>`+"\n", at, y, at+3, y+10, n*tick/1e3)
	}
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" font-family="DejaVu Sans, Verdana, sans-serif" font-size="10">`+
		`<defs><marker id="a" markerWidth="5" markerHeight="5" refX="4" refY="2.5" orient="auto"><path d="M0 0L5 2.5L0 5z" fill="#868e96"/></marker></defs>`+
		`<rect width="100%%" height="100%%" fill="#fff"/>`+"\n%s</svg>\n", left+width+8, y+16, b.String())
}

// TestTracePicture draws the picture of docs/trace.md, out of the file of a real run.
func TestTracePicture(t *testing.T) {
	if *screenshots == "" {
		t.Skip("-screenshots names no folder")
	}
	gpt := buildGPT(t)
	cmd := launch(t, append([]string{"run", "--plain", "--threads", "1", "--workers", "4", "--stages", "2", "--run-dir", "run", "--chaos", "kill:2@4+60", gpt},
		strings.Fields("--layers 6 --width 64 --heads 4 --context 64 --global-batch 32 --micro-batch 4 --steps 6 --eval-every 0")...)...)
	if status, stdout, stderr := result(t, cmd); status != 0 {
		t.Fatalf("%d\n%s%s", status, stdout, stderr)
	}
	next := launch(t, "trace", "run", "--perfetto", "out.json")
	next.Dir = cmd.Dir
	if status, stdout, stderr := result(t, next); status != 0 {
		t.Fatalf("%d\n%s%s", status, stdout, stderr)
	}
	file, err := os.ReadFile(filepath.Join(cmd.Dir, "out.json"))
	if err != nil {
		t.Fatal(err)
	}
	checkTraceEvents(t, file, 4)
	if err := os.WriteFile(filepath.Join(*screenshots, "trace.svg"), []byte(drawTrace(t, file)), 0o644); err != nil {
		t.Fatal(err)
	}
}
