package chaos

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		text  string
		fault Fault
		again string // as String writes it, if other than text
	}{
		{"kill:2@31", Fault{Kind: KindKill, Worker: 2, Step: 31}, ""},
		{"kill:2@31+0", Fault{Kind: KindKill, Worker: 2, Step: 31}, "kill:2@31"},
		{"freeze:0@1+2.5", Fault{Kind: KindFreeze, Step: 1, After: 2500 * time.Microsecond}, ""},
		{"kill:0@1+0.000001", Fault{Kind: KindKill, Step: 1, After: 1}, ""},
		{"kill:0@1+3600000", Fault{Kind: KindKill, Step: 1, After: time.Hour}, ""},
		{"kill:0@1+12.50", Fault{Kind: KindKill, Step: 1, After: 12500 * time.Microsecond}, "kill:0@1+12.5"},
		{"leave:3@9/gather", Fault{Kind: KindLeave, Worker: 3, Step: 9, Phase: PhaseGather}, ""},
		{"flip:1@2", Fault{Kind: KindFlip, Worker: 1, Step: 2, Target: TargetOwn}, "flip:1@2:own"},
		{"flip:1@2/commit:moment", Fault{Kind: KindFlip, Worker: 1, Step: 2, Phase: PhaseCommit, Target: TargetMoment}, ""},
		{"flip:1@2+7:copy", Fault{Kind: KindFlip, Worker: 1, Step: 2, After: 7 * time.Millisecond, Target: TargetCopy}, ""},
		{"slow:4@5:0.25", Fault{Kind: KindSlow, Worker: 4, Step: 5, Factor: 0.25}, ""},
		{"slow:4@5:1.0", Fault{Kind: KindSlow, Worker: 4, Step: 5, Factor: 1}, "slow:4@5:1"},
		{"join@12", Fault{Kind: KindJoin, Step: 12}, ""},
		{" killhost:1@8 ", Fault{Kind: KindKillHost, Host: 1, Step: 8}, "killhost:1@8"},
		{"freezehost:0@2147483647", Fault{Kind: KindFreezeHost, Step: maxNumber}, ""},
		{"cut:2@8:0.5", Fault{Kind: KindCut, Host: 2, Step: 8, Seconds: 0.5}, ""},
		{"slowlink:5-3@8:0.000001", Fault{Kind: KindSlowLink, A: 3, B: 5, Step: 8, Factor: 1e-6}, "slowlink:3-5@8:0.000001"},
	} {
		s, err := Parse(c.text)
		if err != nil || len(s.Faults) != 1 || s.Faults[0] != c.fault || s.Random != nil {
			t.Errorf("Parse(%q) = %+v, %v, want %+v", c.text, s, err, c.fault)
			continue
		}
		if c.again == "" {
			c.again = c.text
		}
		if got := s.String(); got != c.again {
			t.Errorf("%q is written back as %q, want %q", c.text, got, c.again)
		}
	}

	text := "kill:0@1,random:18446744073709551615:1,freeze:1@1,random:7:0.05:freeze+kill"
	s, err := Parse(text)
	want := Schedule{
		Faults: []Fault{{Kind: KindKill, Step: 1}, {Kind: KindFreeze, Worker: 1, Step: 1}},
		Random: []Random{{Seed: 1<<64 - 1, Rate: 1}, {Seed: 7, Rate: 0.05, Kinds: []Kind{KindKill, KindFreeze}}},
	}
	if err != nil || !reflect.DeepEqual(s, want) {
		t.Errorf("Parse(%q) = %+v, %v, want %+v", text, s, err, want)
	}
	if s, err := Parse(" "); err != nil || !reflect.DeepEqual(s, Schedule{}) || s.String() != "" {
		t.Errorf("Parse of nothing = %+v, %v, want an empty schedule", s, err)
	}
}

func TestParseFaults(t *testing.T) {
	for _, c := range []struct {
		text  string
		fault []string // one for each line: what it must contain
	}{
		{"kil:2@31", []string{`part 1, "kil:2@31": "kil" is not a kind of fault: want one of kill, freeze, leave, flip, slow, join, killhost, freezehost, cut, slowlink, or random`}},
		{"boom", []string{`"boom" is not a kind`}},
		{"kill:1@1,,join@2,", []string{`part 2, "": is empty: leave out the comma`, `part 4, "": is empty`}},
		{"kill", []string{"want kill:W@S, kill:W@S+MS or kill:W@S/PHASE"}},
		{"kill:2", []string{"want kill:W@S"}},
		{"kill@2", []string{"want kill:W@S"}},
		{"join:2@3", []string{"want join@S"}},
		{"join", []string{"want join@S"}},
		{"join@3:1", []string{"want join@S"}},
		{"join@3+4", []string{"join happens when its step begins, so nothing can follow the step: want join@S"}},
		{"killhost:1@3/commit", []string{"want killhost:H@S"}},
		{"kill:x@0", []string{`the worker "x" is not a whole number from 0`, `the step "0" is not a whole number from 1 to 2147483647`}},
		{"kill:-1@+5", []string{`the worker "-1"`, `the step "" is no`}},
		{"kill:1@2147483648", []string{`the step "2147483648"`}},
		{"kill:1@2:3", []string{"want kill:W@S"}},
		{"kill:1@2+", []string{"\"+\" is not a time after the beginning of the step: want milliseconds up to 3600000, such as +2.5"}},
		{"kill:1@2+1s2", []string{"\"+1s2\" is not a time"}},
		{"kill:1@2+1.2.3", []string{"not a time"}},
		{"kill:1@2+3600001", []string{"not a time"}},
		{"kill:1@2+5/commit", []string{"\"+5/commit\" is not a time"}},
		{"kill:1@2/comit", []string{`"comit" is not a phase: want one of forward, backward, reduce, commit, gather`}},
		{"flip:1@2:mine", []string{`"mine" cannot be flipped: want one of own, mirror, copy, moment`}},
		{"flip:1@2:", []string{`"" cannot be flipped`}},
		{"slow:1@2", []string{"want slow:W@S:FACTOR"}},
		{"slow:1@2:0", []string{`the factor "0" is wrong: want a share of the full speed, above 0 and at most 1, such as 0.5`}},
		{"slow:1@2:1.1", []string{`the factor "1.1"`}},
		{"slow:1@2:1e-1", []string{`the factor "1e-1"`}},
		{"slow:1@2:NaN", []string{`the factor "NaN"`}},
		{"cut:1@2:0", []string{`the duration "0" is wrong: want seconds, from 0.001 to 86400`}},
		{"slowlink:3@2:0.5", []string{`the link "3" does not name two workers: want A-B, such as 0-3`}},
		{"slowlink:3-3@2:0.5", []string{"worker 3 has no link to itself"}},
		{"slowlink:a-b@2:2", []string{`the worker "a"`, `the worker "b"`, `the factor "2"`}},
		{"random:7", []string{"want random:SEED:RATE or random:SEED:RATE:KINDS, such as random:7:0.05:kill+freeze"}},
		{"random:x:2:kill+kill+boom+", []string{`the seed "x"`, `the rate "2" is wrong`, "the kind kill is named twice", `"boom" is not a kind`, `"" is not a kind`}},
		{"kill:1@2,join@3,kill:1@2+0.0", []string{`part 3, "kill:1@2+0.0": is the same as part 1: leave one of them out, or give it another step`}},
		{"kill:1@2\n" + strings.Repeat("x", 100), []string{`x"...: the step`}},
		{strings.Repeat(",", MaxFaults), []string{"2049 parts are too many: want at most 2048"}},
	} {
		s, err := Parse(c.text)
		if err == nil {
			t.Errorf("Parse(%q) = %+v, want problems", c.text, s)
			continue
		}
		lines := strings.Split(err.Error(), "\n")
		if len(lines) != len(c.fault) {
			t.Errorf("Parse(%q): problems %q, want %d", c.text, lines, len(c.fault))
			continue
		}
		for i, want := range c.fault {
			if !strings.Contains(lines[i], want) {
				t.Errorf("Parse(%q): fault %q, want it to contain %q", c.text, lines[i], want)
			}
		}
	}
}

func anyFault(t *rapid.T) Fault {
	number := rapid.OneOf(rapid.IntRange(0, 9), rapid.IntRange(0, maxNumber))
	f := rapid.SampledFrom(forms).Draw(t, "form")
	h := Fault{Kind: f.kind, Step: max(1, number.Draw(t, "step"))}
	switch f.on {
	case oneWorker:
		h.Worker = number.Draw(t, "worker")
	case oneHost:
		h.Host = number.Draw(t, "host")
	case oneLink:
		h.B = max(1, number.Draw(t, "b"))
		h.A = rapid.IntRange(0, h.B-1).Draw(t, "a")
	}
	if f.moment {
		h.Phase = rapid.SampledFrom(append([]Phase{""}, phases...)).Draw(t, "phase")
		if h.Phase == "" {
			h.After = time.Duration(rapid.Int64Range(0, int64(MaxAfter)).Draw(t, "after"))
		}
	}
	switch f.takes {
	case takesFactor:
		h.Factor = rapid.Float64Range(MinFactor, 1).Draw(t, "factor")
	case takesSeconds:
		h.Seconds = rapid.Float64Range(MinSeconds, MaxSeconds).Draw(t, "seconds")
	case takesTarget:
		h.Target = rapid.SampledFrom(targets).Draw(t, "target")
	}
	return h
}

// Every schedule is read back as it was written.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s Schedule
		s.Faults = rapid.SliceOfNDistinct(rapid.Custom(anyFault), 0, 6, rapid.ID).Draw(t, "faults")
		if len(s.Faults) == 0 {
			s.Faults = nil
		}
		for i := range rapid.IntRange(0, 2).Draw(t, "randoms") {
			r := Random{Seed: rapid.Uint64().Draw(t, "seed")&^1 | uint64(i), Rate: rapid.Float64Range(MinRate, 1).Draw(t, "rate")}
			for _, k := range kinds() {
				if rapid.Bool().Draw(t, string(k)) {
					r.Kinds = append(r.Kinds, k)
				}
			}
			s.Random = append(s.Random, r)
		}
		again, err := Parse(s.String())
		if err != nil || !reflect.DeepEqual(again, s) {
			t.Fatalf("%q\nis read as %+v, %v\nwant       %+v", s, again, err, s)
		}
	})
}

// Whatever the text is: it is refused with one line for a fault, or means the same when it is written back.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"kill:2@31", "freeze:0@1+2.5,leave:1@4/commit", "flip:1@2:moment", "slow:1@2:0.5,slow:1@9:1", "join@3", "killhost:0@1,freezehost:1@2",
		"cut:1@2:3.5", "slowlink:0-1@2:0.1", "random:7:0.05:kill+freeze", "random:7:1", "kill:@/:+,", "slowlink:1-1@1+1:", ",",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			for _, line := range strings.Split(err.Error(), "\n") {
				if !strings.HasPrefix(line, "part ") && !strings.Contains(line, "parts are too many") {
					t.Errorf("%q: the line %q of a fault names no part", text, line)
				}
			}
			return
		}
		again, err := Parse(s.String())
		if err != nil || !reflect.DeepEqual(again, s) {
			t.Errorf("%q is %+v; written back as %q it is %+v, %v", text, s, s, again, err)
		}
	})
}

func TestPick(t *testing.T) {
	s, err := Parse("kill:1@2,flip:0@3,slowlink:1-2@4:0.5,cut:0@5:1,cut:1@5:1,killhost:1@6,freezehost:0@7,join@8")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		got  []Fault
		want string
	}{
		{"worker 1", s.Worker(1), "kill:1@2,slowlink:1-2@4:0.5"},
		{"worker 2", s.Worker(2), "slowlink:1-2@4:0.5"},
		{"worker 3", s.Worker(3), ""},
		{"host 0", s.Host(0), "cut:0@5:1,freezehost:0@7"},
		{"host 1", s.Host(1), "cut:1@5:1,killhost:1@6"},
		{"joins", s.Joins(), "join@8"},
	} {
		if got := (Schedule{Faults: c.got}).String(); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// The expanded schedule of a seed is part of what a run prints and others repeat: these must never change.
func TestExpandGolden(t *testing.T) {
	run := Run{Steps: 60, Workers: 8, Hosts: 5}
	for spec, want := range map[string]string{
		"random:7:0.2": "slowlink:1-2@3:0.5,join@4,slow:4@8:0.75,kill:3@20/forward,slow:1@26:0.75,join@27,cut:2@34:1.5,cut:4@35:0.25," +
			"freeze:5@37/forward,join@38,kill:4@46/gather,join@47,flip:0@48/commit:own,leave:6@49+22.27,flip:1@58/commit:moment," +
			"killhost:3@60",
		"random:7:0.1:kill+freeze,kill:3@5": "kill:3@5,freeze:4@27+28.293,freeze:7@35/backward,freeze:6@38+26.586,kill:2@46/gather,freeze:0@47/backward,kill:1@48/commit",
		"random:1:0.5:flip+slow,random:2:0.1": "slow:4@2:0.25,slow:6@3:0.75,slow:0@4:1,slow:0@6:1,slow:3@7:0.25,slow:5@8:0.5,slow:2@9:0.5,slow:2@12:1,slow:1@13:1," +
			"flip:0@14/backward:moment,slowlink:4-6@16:0.5,flip:3@21+14.84:mirror,slowlink:0-7@22:0.75,slow:4@23:1," +
			"flip:4@24/commit:mirror,slow:6@27:0.5,slowlink:2-5@27:1,flip:4@28/reduce:own,slow:5@29:0.25,slow:4@30:0.25," +
			"slow:7@31:0.75,join@31,slow:0@32:0.5,slow:1@33:1,slow:0@34:0.25,slow:0@35:0.25,slow:4@36:0.5,slow:0@38:0.5," +
			"slow:7@40:0.25,flip:4@42/commit:own,slow:7@43:0.75,slow:6@45:0.25,slow:3@47:0.5,flip:7@48+49.005:mirror," +
			"flip:1@51+34.341:moment,slow:2@53:0.25,killhost:2@53,slow:0@54:0.75,flip:0@56/commit:moment," +
			"flip:3@57+33.972:mirror,flip:0@59/forward:moment",
	} {
		if got := expand(t, spec, run).String(); got != want {
			t.Errorf("%s is expanded to\n%s\nwant\n%s", spec, got, want)
		}
	}
}

func expand(t *testing.T, spec string, run Run) Schedule {
	t.Helper()
	s, err := Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	s, err = s.Expand(run)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestExpand(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		run := Run{
			Steps:   rapid.IntRange(1, 80).Draw(t, "steps"),
			Workers: rapid.IntRange(1, 9).Draw(t, "workers"),
			Hosts:   rapid.IntRange(0, 7).Draw(t, "hosts"),
			Respawn: rapid.Bool().Draw(t, "respawn"),
			Within:  time.Duration(rapid.IntRange(0, 9).Draw(t, "within")) * time.Millisecond,
		}
		s := Schedule{Random: []Random{{Seed: rapid.Uint64().Draw(t, "seed"), Rate: rapid.Float64Range(MinRate, 1).Draw(t, "rate")}}}
		got, err := s.Expand(run)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Parse(got.String()); err != nil || !reflect.DeepEqual(again, got) {
			t.Fatalf("%q is read back as %v, %v", got, again, err)
		}
		if again, err := s.Expand(run); err != nil || !reflect.DeepEqual(again, got) {
			t.Fatalf("expanded twice: %q and %q, %v", got, again, err)
		}
		longer := run
		longer.Steps += 20
		if more, err := s.Expand(longer); err != nil || !strings.HasPrefix(more.String(), got.String()) {
			t.Fatalf("20 steps more turn %q into %q, %v", got, more, err)
		}

		// The count of what is left, the slow way: hosts hold their workers in any way that splits them evenly.
		hosts := max(1, run.Hosts)
		for shift := range run.Workers {
			workers, lostHosts := map[int]bool{}, map[int]bool{}
			for _, h := range got.Faults {
				switch h.Kind {
				case KindKill, KindFreeze:
					if !run.Respawn {
						workers[h.Worker] = true
					}
				case KindLeave:
					workers[h.Worker] = true
				case KindKillHost, KindFreezeHost:
					if lostHosts[h.Host] {
						t.Fatalf("%q: host %d is lost twice", got, h.Host)
					}
					lostHosts[h.Host] = true
					for w := range run.Workers {
						if (w+shift)%hosts == h.Host {
							workers[w] = true
						}
					}
				case KindCut:
					if 2*(len(lostHosts)+1) >= hosts {
						t.Fatalf("%q: %s leaves no majority of %d hosts", got, h, hosts)
					}
				}
				if len(workers) == run.Workers || 2*len(lostHosts) >= hosts {
					t.Fatalf("%q: %s leaves no worker or no majority of %d hosts", got, h, hosts)
				}
			}
		}
	})
}

// Given enough steps, every kind, phase and target is drawn, and about as many faults as the rate says.
func TestExpandDrawsAll(t *testing.T) {
	got := expand(t, "random:3:0.25", Run{Steps: 4000, Workers: 500, Hosts: 500, Within: 3 * time.Millisecond})
	var words []string
	for _, h := range got.Faults {
		words = append(words, string(h.Kind), string(h.Phase), string(h.Target))
		if h.After > 3*time.Millisecond || h.After%time.Microsecond != 0 {
			t.Errorf("%s: want whole microseconds up to 3 ms", h)
		}
	}
	want := []string{""}
	for _, k := range kinds() {
		want = append(want, string(k))
	}
	for _, p := range phases {
		want = append(want, string(p))
	}
	for _, p := range targets {
		want = append(want, string(p))
	}
	slices.Sort(words)
	slices.Sort(want)
	if words = slices.Compact(words); !slices.Equal(words, want) {
		t.Errorf("drew %q, want %q", words, want)
	}
	if n := len(got.Faults); n < 900 || n > 1100 {
		t.Errorf("drew %d faults in 4000 steps at a rate of 0.25, want about 1000", n)
	}
}

func TestExpandFaults(t *testing.T) {
	small := Run{Steps: 10, Workers: 2}
	for _, c := range []struct {
		spec  string
		run   Run
		fault []string
	}{
		{"kill:2@11,cut:1@3:1", small, []string{
			"kill:2@11 comes too late: the run has 10 steps", "kill:2@11: there is no worker 2: want one from 0 to 1",
			"cut:1@3:1: there is no host 1: want one from 0 to 0",
		}},
		{"join@1,kill:2@5", small, nil},
		{"kill:9@5,random:1:0.1:join", small, nil},
		{"slowlink:0-2@5:0.5", small, []string{"there is no worker 2"}},
		{"random:1:0.5:killhost+cut", small, []string{"random:1:0.5:killhost+cut has nothing to draw from in a run of 2 workers and 1 hosts"}},
		{"random:1:0.5:kill", Run{Steps: 10, Workers: 1}, []string{"has nothing to draw from"}},
		{"random:1:0.5:kill", Run{Steps: 10, Workers: 1, Respawn: true}, nil},
		{"kill:0@9,random:1:0.5:kill", small, []string{"has nothing to draw from"}},
		{"random:1:1:join", Run{Steps: MaxFaults + 1, Workers: 1}, []string{"random:1:1:join draws more than 2048 faults in 2049 steps: want a lower rate"}},
		{"join@1", Run{}, []string{"want at least one of each"}},
	} {
		s, err := Parse(c.spec)
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		if _, err := s.Expand(c.run); err != nil {
			lines = strings.Split(err.Error(), "\n")
		}
		if len(lines) != len(c.fault) {
			t.Errorf("%s in %+v: problems %q, want %q", c.spec, c.run, lines, c.fault)
			continue
		}
		for i, want := range c.fault {
			if !strings.Contains(lines[i], want) {
				t.Errorf("%s in %+v: fault %q, want it to contain %q", c.spec, c.run, lines[i], want)
			}
		}
	}
}

func ExampleParse() {
	_, err := Parse("kill:2@31/comit,slow:1@40:2,freez:0@50")
	fmt.Println(err)
	// Output:
	// part 1, "kill:2@31/comit": "comit" is not a phase: want one of forward, backward, reduce, commit, gather
	// part 2, "slow:1@40:2": the factor "2" is wrong: want a share of the full speed, above 0 and at most 1, such as 0.5
	// part 3, "freez:0@50": "freez" is not a kind of fault: want one of kill, freeze, leave, flip, slow, join, killhost, freezehost, cut, slowlink, or random
}
