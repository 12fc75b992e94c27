package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/chaos"
)

// possibleFor returns the kinds of faults that a run can inject.
func possibleFor(hosts int) []chaos.Kind {
	kinds := []chaos.Kind{chaos.KindKill, chaos.KindFreeze, chaos.KindLeave, chaos.KindFlip, chaos.KindSlow, chaos.KindSlowLink}
	if hosts > 1 {
		kinds = append(kinds, chaos.KindKillHost, chaos.KindFreezeHost)
		if chaos.CanCut() == nil {
			kinds = append(kinds, chaos.KindCut)
		}
	}
	return kinds
}

// parseChaos reads the flag --chaos for a run that begins with so many workers on so many hosts.
func parseChaos(spec string, workers, hosts int) (chaos.Schedule, error) {
	possible := possibleFor(hosts)
	s, err := chaos.Parse(spec)
	if err != nil {
		return s, eachLine(err)
	}
	var faults []error
	absent := func(part fmt.Stringer, kind chaos.Kind) {
		if err := chaos.CanCut(); err != nil && kind == chaos.KindCut {
			faults = append(faults, fmt.Errorf("--chaos: %v: %w", part, err))
		} else if !slices.Contains(possible, kind) {
			faults = append(faults, fmt.Errorf("--chaos: %v: %s is not supported yet; give %s", part, kind, kindsText(possible)))
		}
	}
	for _, h := range s.Faults {
		absent(h, h.Kind)
	}
	for i, r := range s.Random {
		for _, k := range r.Kinds {
			absent(r, k)
		}
		if len(r.Kinds) == 0 {
			s.Random[i].Kinds = possible
		}
	}
	if len(faults) > 0 {
		return s, errors.Join(faults...)
	}
	// How many steps there are is known later; whether there are such workers is not.
	if _, err := (chaos.Schedule{Faults: s.Faults}).Expand(chaos.Run{Steps: math.MaxInt32, Workers: max(1, workers), Hosts: max(1, hosts)}); err != nil {
		return s, eachLine(err)
	}
	return s, nil
}

func kindsText(possible []chaos.Kind) string {
	var words []string
	for _, k := range possible {
		words = append(words, string(k))
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// eachLine makes every line of an error name the flag.
func eachLine(err error) error {
	return errors.New("--chaos: " + strings.ReplaceAll(err.Error(), "\n", "\n--chaos: "))
}

// faultsFor returns what the agent asks for once it knows the job; nil for a run without faults.
func faultsFor(s chaos.Schedule, workers, hosts int) func(steps int) ([]string, error) {
	if len(s.Faults)+len(s.Random) == 0 {
		return nil
	}
	return func(steps int) ([]string, error) {
		expanded, err := s.Expand(chaos.Run{Steps: steps, Workers: workers, Hosts: hosts})
		if err != nil {
			return nil, eachLine(err)
		}
		var texts []string
		for _, h := range expanded.Faults {
			texts = append(texts, h.String())
		}
		return texts, nil
	}
}
