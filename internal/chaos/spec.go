package chaos

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Kind is a kind of fault.
type Kind string

// The kinds of faults, by the words of the grammar.
const (
	KindKill       Kind = "kill"
	KindFreeze     Kind = "freeze"
	KindLeave      Kind = "leave"
	KindFlip       Kind = "flip"
	KindSlow       Kind = "slow"
	KindJoin       Kind = "join"
	KindKillHost   Kind = "killhost"
	KindFreezeHost Kind = "freezehost"
	KindCut        Kind = "cut"
	KindSlowLink   Kind = "slowlink"
)

// Phase is a part of a worker's step.
type Phase string

// The phases in the order of a step. Those of one worker overlap: it may reduce one layer while it computes another, and gathers
// parameters under the next step's forward passes.
const (
	PhaseForward  Phase = "forward"
	PhaseBackward Phase = "backward"
	PhaseReduce   Phase = "reduce"
	PhaseCommit   Phase = "commit"
	PhaseGather   Phase = "gather"
)

// Target is the memory in which a bit is flipped.
type Target string

// The targets.
const (
	TargetOwn    Target = "own"    // parameters of a shard that the worker owns
	TargetMirror Target = "mirror" // parameters of a shard that it mirrors
	TargetCopy   Target = "copy"   // parameters that it has gathered from others
	TargetMoment Target = "moment" // the optimizer's moments of a shard that it owns
)

var (
	phases  = []Phase{PhaseForward, PhaseBackward, PhaseReduce, PhaseCommit, PhaseGather}
	targets = []Target{TargetOwn, TargetMirror, TargetCopy, TargetMoment}
)

// Limits of the grammar.
const (
	MaxFaults  = 2048      // faults of a schedule, also after Expand, so that it fits into an environment variable
	MaxAfter   = time.Hour // of +MS
	MaxSeconds = 86400     // of cut; the least is MinSeconds
	MinSeconds = 0.001
	MinFactor  = 1e-6 // of slow and slowlink
	MinRate    = 1e-9 // of random

	maxNumber = math.MaxInt32 // of workers, hosts and steps
)

// A Fault is injected once. Fields that its Kind does not use are zero, so two faults are the same if they are ==.
type Fault struct {
	Kind    Kind
	Worker  int           // of kill, freeze, leave, flip, slow
	Host    int           // of killhost, freezehost, cut
	A, B    int           // of slowlink: the link's two workers, A < B
	Step    int           // from 1
	After   time.Duration // since the beginning of the step; 0 if Phase is set
	Phase   Phase         // empty, or when the worker enters it
	Factor  float64       // of slow, slowlink: the share of the speed that is left, 1 restores
	Seconds float64       // of cut
	Target  Target        // of flip
}

// String returns the fault as the grammar writes it.
func (h Fault) String() string {
	f, _ := formOf(h.Kind)
	var s strings.Builder
	s.WriteString(string(h.Kind))
	switch f.on {
	case oneWorker:
		fmt.Fprintf(&s, ":%d", h.Worker)
	case oneHost:
		fmt.Fprintf(&s, ":%d", h.Host)
	case oneLink:
		fmt.Fprintf(&s, ":%d-%d", h.A, h.B)
	}
	fmt.Fprintf(&s, "@%d", h.Step)
	if h.Phase != "" {
		s.WriteString("/" + string(h.Phase))
	} else if h.After != 0 {
		// Exact: a count of nanoseconds below MaxAfter has at most 13 digits, and a float64 keeps 15.
		s.WriteString("+" + decimal(float64(h.After)/float64(time.Millisecond)))
	}
	switch f.takes {
	case takesFactor:
		s.WriteString(":" + decimal(h.Factor))
	case takesSeconds:
		s.WriteString(":" + decimal(h.Seconds))
	case takesTarget:
		s.WriteString(":" + string(h.Target))
	}
	return s.String()
}

// A Random stands for faults that are drawn: one in each step, with probability Rate.
type Random struct {
	Seed  uint64
	Rate  float64
	Kinds []Kind // in the order of the grammar; empty means all
}

// String returns the part in the grammar.
func (r Random) String() string {
	s := fmt.Sprintf("random:%d:%s", r.Seed, decimal(r.Rate))
	if len(r.Kinds) > 0 {
		s += ":" + join(r.Kinds, "+")
	}
	return s
}

// A Schedule lists the faults of a run. The zero Schedule leaves it undisturbed.
type Schedule struct {
	Faults []Fault
	Random []Random
}

// String returns the schedule in the grammar: [Parse] makes the same Schedule of it.
func (s Schedule) String() string {
	var parts []string
	for _, h := range s.Faults {
		parts = append(parts, h.String())
	}
	for _, r := range s.Random {
		parts = append(parts, r.String())
	}
	return strings.Join(parts, ",")
}

// Worker returns the faults that a worker injects into itself: its own, and those of its links.
func (s Schedule) Worker(worker int) []Fault {
	return s.pick(func(h Fault) bool {
		switch f, _ := formOf(h.Kind); f.on {
		case oneWorker:
			return h.Worker == worker
		case oneLink:
			return h.A == worker || h.B == worker
		default:
			return false
		}
	})
}

// Host returns the faults of a host as a whole: killhost, freezehost and cut.
func (s Schedule) Host(host int) []Fault {
	return s.pick(func(h Fault) bool {
		f, _ := formOf(h.Kind)
		return f.on == oneHost && h.Host == host
	})
}

// Joins returns the parts that add a worker.
func (s Schedule) Joins() []Fault { return s.pick(func(h Fault) bool { return h.Kind == KindJoin }) }

func (s Schedule) pick(wanted func(Fault) bool) (picked []Fault) {
	for _, h := range s.Faults {
		if wanted(h) {
			picked = append(picked, h)
		}
	}
	return picked
}

// A form is the syntax of a kind.
type form struct {
	kind   Kind
	on     target
	moment bool // +MS and /PHASE may follow the step
	takes  argument
	usage  string
}

// target is what a kind of fault acts on.
type target int

const (
	noTarget target = iota
	oneWorker
	oneHost
	oneLink
)

type argument int

const (
	takesNothing argument = iota
	takesFactor
	takesSeconds
	takesTarget
)

var forms = []form{
	{KindKill, oneWorker, true, takesNothing, "kill:W@S, kill:W@S+MS or kill:W@S/PHASE"},
	{KindFreeze, oneWorker, true, takesNothing, "freeze:W@S, freeze:W@S+MS or freeze:W@S/PHASE"},
	{KindLeave, oneWorker, true, takesNothing, "leave:W@S, leave:W@S+MS or leave:W@S/PHASE"},
	{KindFlip, oneWorker, true, takesTarget, "flip:W@S:TARGET, flip:W@S+MS:TARGET or flip:W@S/PHASE:TARGET"},
	{KindSlow, oneWorker, false, takesFactor, "slow:W@S:FACTOR"},
	{KindJoin, noTarget, false, takesNothing, "join@S"},
	{KindKillHost, oneHost, false, takesNothing, "killhost:H@S"},
	{KindFreezeHost, oneHost, false, takesNothing, "freezehost:H@S"},
	{KindCut, oneHost, false, takesSeconds, "cut:H@S:SECONDS"},
	{KindSlowLink, oneLink, false, takesFactor, "slowlink:A-B@S:FACTOR"},
}

const wantFactor = "a share of the full speed, above 0 and at most 1, such as 0.5"

const randomUsage = "random:SEED:RATE or random:SEED:RATE:KINDS"

func formOf(k Kind) (form, bool) {
	i := slices.IndexFunc(forms, func(f form) bool { return f.kind == k })
	if i < 0 {
		return form{}, false
	}
	return forms[i], true
}

func kinds() (all []Kind) {
	for _, f := range forms {
		all = append(all, f.kind)
	}
	return all
}

// Parse reads a schedule. The error has one line for each problem, which names the part, what is wrong with it and what would be
// right. An empty text is an empty schedule.
func Parse(spec string) (Schedule, error) {
	if strings.TrimSpace(spec) == "" {
		return Schedule{}, nil
	}
	if n := strings.Count(spec, ",") + 1; n > MaxFaults {
		return Schedule{}, fmt.Errorf("%d parts are too many: want at most %d", n, MaxFaults)
	}
	var s Schedule
	var problems []error
	first := map[string]int{}
	for i, text := range strings.Split(spec, ",") {
		text = strings.TrimSpace(text)
		p := part{}
		written := ""
		if word := text[:max(0, strings.IndexAny(text+":", ":@"))]; text == "" {
			p.problem("is empty: leave out the comma, or write a fault such as kill:2@31")
		} else if word == "random" {
			r := p.random(text)
			written = r.String()
			s.Random = append(s.Random, r)
		} else if f, ok := formOf(Kind(word)); ok {
			h := p.fault(f, text)
			written = h.String()
			s.Faults = append(s.Faults, h)
		} else {
			p.problem("%s is not a kind of fault: want one of %s, or random", clip(word), join(kinds(), ", "))
		}
		if before, twice := first[written]; len(p.problems) == 0 && twice {
			p.problem("is the same as part %d: leave one of them out, or give it another step", before)
		}
		if len(p.problems) == 0 {
			first[written] = i + 1
		}
		for _, f := range p.problems {
			problems = append(problems, fmt.Errorf("part %d, %s: %s", i+1, clip(text), f))
		}
	}
	if len(problems) > 0 {
		return Schedule{}, errors.Join(problems...)
	}
	return s, nil
}

// part reads one part and collects its problems.
type part struct {
	problems []string
}

func (p *part) problem(format string, args ...any) {
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

func (p *part) fault(f form, text string) Fault {
	h := Fault{Kind: f.kind}
	name, when, ok := strings.Cut(text[len(f.kind):], "@")
	if _, colon := strings.CutPrefix(name, ":"); !ok || colon == (f.on == noTarget) {
		p.problem("want %s", f.usage)
		return h
	}
	name = strings.TrimPrefix(name, ":")
	switch f.on {
	case oneWorker:
		h.Worker = p.number("worker", name, 0)
	case oneHost:
		h.Host = p.number("host", name, 0)
	case oneLink:
		a, b, ok := strings.Cut(name, "-")
		if !ok {
			p.problem("the link %s does not name two workers: want A-B, such as 0-3", clip(name))
			break
		}
		had := len(p.problems)
		h.A, h.B = p.number("worker", a, 0), p.number("worker", b, 0)
		if h.A == h.B && len(p.problems) == had {
			p.problem("worker %d has no link to itself: name two workers", h.A)
		}
		h.A, h.B = min(h.A, h.B), max(h.A, h.B)
	}

	when, arg, hasArg := strings.Cut(when, ":")
	if at := strings.IndexAny(when, "+/"); at >= 0 {
		sign, moment := when[at], when[at+1:]
		when = when[:at]
		switch {
		case !f.moment:
			p.problem("%s happens when its step begins, so nothing can follow the step: want %s", f.kind, f.usage)
		case sign == '+':
			h.After = p.millis(moment)
		case !slices.Contains(phases, Phase(moment)):
			p.problem("%s is not a phase: want one of %s", clip(moment), join(phases, ", "))
		default:
			h.Phase = Phase(moment)
		}
	}
	h.Step = p.number("step", when, 1)

	switch {
	case f.takes == takesTarget && !hasArg:
		h.Target = TargetOwn
	case f.takes == takesTarget && !slices.Contains(targets, Target(arg)):
		p.problem("%s cannot be flipped: want one of %s", clip(arg), join(targets, ", "))
	case f.takes == takesTarget:
		h.Target = Target(arg)
	case hasArg != (f.takes != takesNothing):
		p.problem("want %s", f.usage)
	case f.takes == takesFactor:
		h.Factor = p.decimal("factor", arg, MinFactor, 1, wantFactor)
	case f.takes == takesSeconds:
		h.Seconds = p.decimal("duration", arg, MinSeconds, MaxSeconds, "seconds, from 0.001 to 86400, such as 5")
	}
	return h
}

func (p *part) random(text string) (r Random) {
	fields := strings.Split(text, ":")
	if len(fields) < 3 || len(fields) > 4 {
		p.problem("want %s, such as random:7:0.05:kill+freeze", randomUsage)
		return r
	}
	seed, err := strconv.ParseUint(fields[1], 10, 64)
	if err != nil {
		p.problem("the seed %s is not a whole number from 0 to %d", clip(fields[1]), uint64(math.MaxUint64))
	}
	r.Seed = seed
	r.Rate = p.decimal("rate", fields[2], MinRate, 1, "a probability for each step, above 0 and at most 1, such as 0.05")
	if len(fields) == 3 {
		return r
	}
	for _, k := range strings.Split(fields[3], "+") {
		if _, ok := formOf(Kind(k)); !ok {
			p.problem("%s is not a kind of fault: want some of %s", clip(k), join(kinds(), "+"))
		} else if slices.Contains(r.Kinds, Kind(k)) {
			p.problem("the kind %s is named twice: once is enough", k)
		} else {
			r.Kinds = append(r.Kinds, Kind(k))
		}
	}
	all := kinds()
	slices.SortFunc(r.Kinds, func(a, b Kind) int { return slices.Index(all, a) - slices.Index(all, b) })
	return r
}

func (p *part) number(what, text string, least int) int {
	n, err := strconv.ParseUint(text, 10, 31)
	if err != nil || int(n) < least {
		p.problem("the %s %s is not a whole number from %d to %d", what, clip(text), least, maxNumber)
		return least
	}
	return int(n)
}

// decimal reads a number of digits with at most one dot.
func (p *part) decimal(what, text string, least, most float64, want string) float64 {
	v, err := strconv.ParseFloat(text, 64)
	if !plain(text) || err != nil || v < least || v > most {
		p.problem("the %s %s is wrong: want %s", what, clip(text), want)
		return least
	}
	return v
}

func (p *part) millis(text string) time.Duration {
	d, err := time.ParseDuration(text + "ms") // exact to the nanosecond
	if !plain(text) || err != nil || d > MaxAfter {
		p.problem("%s is not a time after the beginning of the step: want milliseconds up to %d, such as +2.5", clip("+"+text), MaxAfter.Milliseconds())
		return 0
	}
	return d
}

func plain(text string) bool { return text != "" && strings.Trim(text, "0123456789.") == "" }

func decimal(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

func join[T ~string](words []T, between string) string {
	var s []string
	for _, w := range words {
		s = append(s, string(w))
	}
	return strings.Join(s, between)
}

// clip quotes text for an error, which stays one readable line whatever the text is.
func clip(text string) string {
	const most = 60
	if len(text) > most {
		return strconv.Quote(text[:most]) + "..."
	}
	return strconv.Quote(text)
}
