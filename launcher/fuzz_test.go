package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// Whatever flags are given, the command refuses them with lines that name a flag, or gets as far as to look for PROGRAM.
func FuzzRunFlags(f *testing.F) {
	f.Add("--workers=4\n--stages=2\n--chaos=kill:1@3/backward,random:7:0.1:kill+join")
	f.Add("--workers=2147483648\n--threads=0\n--detect=1ms\n--reduction=x\n--zero=3\n--reshape=some\n--run-dir=\n--clocks=x")
	f.Add("--ui\n--ui=:0\n--plain=maybe\n--emulate-hosts=3\n--chaos=cut:1@2:3.5,join@1,slowlink:0-1@2:0.1")
	f.Add("--min-workers=99999999999999999999\n--mirrors=-1\n--digests\n--respawn=false\n--fly=1")
	f.Fuzz(func(t *testing.T, text string) {
		var flags []string
		for flag := range strings.SplitSeq(text, "\n") {
			// What is not a flag would be a PROGRAM, and run.
			if name, _, _ := strings.Cut(strings.TrimPrefix(flag, "--"), "="); strings.HasPrefix(flag, "--") && strings.Contains(flag, "=") && name != "" && name != "help" {
				flags = append(flags, flag)
			}
		}
		cmd := newRun()
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetFlagErrorFunc(cli.FlagError)
		cmd.SetArgs(append(flags, "/nonexistent/program"))
		err := cmd.Execute()
		if err == nil || errors.As(err, new(cli.Failure)) {
			t.Fatalf("%q: %v", flags, err)
		}
		if !strings.Contains(err.Error(), "/nonexistent/program is not there") && !strings.Contains(err.Error(), "-") {
			t.Fatalf("%q: %v", flags, err)
		}
	})
}

// Whatever an agent writes, its supervisor reads it or drops it.
func FuzzReports(f *testing.F) {
	f.Add([]byte(`{"term":1,"kind":"view.Note","value":"building"}` + "\n" + `{"term":1,"kind":"view.Begin","value":{"Job":{"program":"gpt","steps":9}}}` + "\n"))
	f.Add([]byte(`{"term":2,"kind":"output","text":"x"}` + "\n" + `{"term":2,"kind":"close"}` + "\n" + `{"term":3,"kind":"end","status":1}` + "\n"))
	f.Add([]byte(`{"kind":"view.Step","value":[]}` + "\n" + `{"kind":"trace.StepDone","value":{}}` + "\n{"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var out bytes.Buffer
		s := newSupervisor(runFlags{workers: 1, hosts: 1}, "", nil, discard{}, &out)
		s.listen(bytes.NewReader(text))
	})
}

// discard is a view that shows nothing.
type discard struct{}

func (discard) Show(view.Event) {}
func (discard) Close()          {}
