// Package inspect has the commands that look: at a run directory, at this machine, or at a cluster that is only described.
package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// Status is what launcher status --json prints.
type Status struct {
	RunDir    string   `json:"run_dir"`
	State     string   `json:"state"` // starting, running, done, stopped, or died: killed with its launcher
	Program   string   `json:"program"`
	Step      int      `json:"step"`  // newest committed
	Steps     int      `json:"steps"` // of the whole run
	Loss      *float64 `json:"loss"`  // of the newest step; null before the first
	ValLoss   *float64 `json:"val_loss"`
	Stages    int      `json:"stages"`
	Plan      string   `json:"plan"`       // version; "" before the first
	Reason    string   `json:"reason"`     // of the plan
	StoppedBy string   `json:"stopped_by"` // of a run that was stopped

	// Why training holds on a full disk, and since when; "" and null where it does not.
	DiskFull      string     `json:"disk_full"`
	DiskFullSince *time.Time `json:"disk_full_since"`

	// How long steps wait for data, where they do, and since when; "" and null elsewhere.
	DataBound      string     `json:"data_bound"`
	DataBoundSince *time.Time `json:"data_bound_since"`

	// Why checkpoints fail, and since when there is none; "" and null where they do not fail.
	Unsaved      string     `json:"unsaved"`
	UnsavedSince *time.Time `json:"unsaved_since"`

	WorkersLost int     `json:"workers_lost"`
	Recoveries  int     `json:"recoveries"`
	RecoveryMS  float64 `json:"recovery_ms"` // the newest took so long

	Lineage []Before `json:"lineage"` // what the run was before it was resumed with something changed, the oldest first

	Workers []WorkerStatus `json:"workers"`
}

// Before is a stretch of steps of a run after which something was changed.
type Before struct {
	Until   int             `json:"until"` // its last step
	Changed []rundir.Change `json:"changed"`
}

// WorkerStatus is a worker of the newest plan, or one that is gone.
type WorkerStatus struct {
	ID        int    `json:"id"`
	Life      int    `json:"incarnation"`
	Gone      string `json:"gone"` // why; "" for one of the plan
	Stages    []int  `json:"stages"`
	Layers    []int  `json:"layers"`
	Call      string `json:"call"`     // of user code that has not returned although it should have; "" for none
	Since     string `json:"since"`    // when it was called
	Ring      string `json:"ring"`     // what the gossip ring believes of it: alive, suspect, dead or left; "" where that is not known
	Forwards  *int64 `json:"forwards"` // null while the run is under way
	Backwards *int64 `json:"backwards"`
}

// NewStatus returns the command.
func NewStatus() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status [RUN_DIR]",
		Short: "Show the progress of a run and its workers",
		Long: `status reads a run directory, by default runs/latest, and prints whether the run is
under way, its newest step and loss, and what each worker holds.

The state is starting, running, done (all steps), stopped (and by what), or died, which means
that the launcher was killed and could not say anything.`,
		Example: `  launcher status
  launcher status runs/small --json | jq .loss`,
		Args: cli.AtMost(1, "[RUN_DIR]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			path := append(args, cli.Latest)[0]
			s, starting := startingStatus(path)
			if !starting {
				r, err := cli.ReadRun(path)
				if err != nil {
					return err
				}
				if s, err = StatusOf(r); err != nil {
					return cli.Fail(err)
				}
			}
			return cli.Print(cmd.OutOrStdout(), s, asJSON, s.print)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the status as JSON")
	return cmd
}

// startingStatus returns the status of a run that has not begun to train, if it is one.
func startingStatus(path string) (s Status, ok bool) {
	now, err := rundir.ReadWorkers(path)
	if _, none := rundir.Read(path); err != nil || !errors.Is(none, rundir.ErrNoRun) {
		return s, false
	}
	s = Status{RunDir: path, State: "starting", Workers: []WorkerStatus{}, Lineage: []Before{}}
	for _, p := range now.Workers {
		w := WorkerStatus{ID: p.ID, Life: p.Incarnation, Stages: []int{}, Layers: []int{}}
		w.calls(p)
		s.Workers = append(s.Workers, w)
	}
	return s, true
}

// calls takes in which call a worker waits for.
func (s *WorkerStatus) calls(p rundir.Process) {
	if s.Call = p.Call; p.Since != nil {
		s.Since = p.Since.UTC().Format(time.RFC3339)
	}
}

// StatusOf returns the status that a record of a run directory tells.
func StatusOf(r rundir.Record) (Status, error) {
	s := Status{
		RunDir: r.Path, State: "died", Program: r.Job.Program, Steps: r.Job.Steps, Stages: r.Job.Stages,
		ValLoss: r.ValLoss, Workers: []WorkerStatus{}, Lineage: []Before{},
	}
	for _, a := range r.Job.Lineage {
		s.Lineage = append(s.Lineage, Before{a.Until, a.Changed})
	}
	if r.Last != nil {
		s.Step, s.Loss = r.Last.Step, &r.Last.Loss
	}
	if r.Plan != nil {
		p, err := plan.Parse(r.Plan.Plan)
		if err != nil {
			return s, fmt.Errorf("%s: %w", filepath.Join(r.Path, "plans.jsonl"), err)
		}
		s.Plan, s.Reason, s.Stages = p.Version.String(), r.Plan.Reason, len(p.Stages)
		for _, w := range p.Workers {
			s.Workers = append(s.Workers, WorkerStatus{ID: int(w.ID), Life: w.Incarnation, Stages: p.StagesOf(w.ID), Layers: append([]int{}, p.LayersOf(w.ID)...)})
		}
	}
	switch {
	case r.Summary != nil:
		s.State, s.StoppedBy = "done", r.Summary.StoppedBy
		if s.StoppedBy != "" {
			s.State = "stopped"
		}
		s.Workers = []WorkerStatus{}
		for _, w := range r.Summary.Workers {
			s.Workers = append(s.Workers, WorkerStatus{ID: w.ID, Life: w.Incarnation, Stages: w.Stages, Layers: w.Layers, Forwards: &w.Forwards, Backwards: &w.Backwards})
		}
	case r.Running:
		s.State = "running"
		now, err := rundir.ReadWorkers(r.Path)
		if err != nil && !errors.Is(err, rundir.ErrNotRunning) { // it may end meanwhile
			return s, err
		}
		for _, p := range now.Workers {
			for i := range s.Workers {
				if w := &s.Workers[i]; w.ID == p.ID && w.Life == p.Incarnation {
					w.Ring = p.Ring
					w.calls(p)
				}
			}
		}
	}
	if f := r.Full; f != nil && r.Summary == nil {
		s.DiskFull, s.DiskFullSince = f.Reason, &f.Time.Time
	}
	if e := r.Starved; e != nil && r.Summary == nil {
		s.DataBound, s.DataBoundSince = e.Reason, &e.Time.Time
	}
	if u := r.Unsaved; u != nil {
		since := cmp.Or(r.Saved, r.Began, u).Time.Time
		s.Unsaved, s.UnsavedSince = u.Reason, &since
	}
	s.Recoveries = len(r.Recoveries)
	if s.Recoveries > 0 {
		s.RecoveryMS = r.Recoveries[0].TotalMS
	}
	for _, e := range r.Gone {
		if e.Kind == "lost" {
			s.WorkersLost++
		}
		i := slices.IndexFunc(s.Workers, func(w WorkerStatus) bool { return w.ID == e.Worker })
		switch {
		case i < 0:
			s.Workers = append(s.Workers, WorkerStatus{ID: e.Worker, Gone: e.Reason, Stages: []int{}, Layers: []int{}})
		case r.Summary != nil:
			s.Workers[i].Gone = e.Reason
		}
	}
	slices.SortStableFunc(s.Workers, func(a, b WorkerStatus) int { return cmp.Or(a.ID-b.ID, a.Life-b.Life) })
	return s, nil
}

func (s Status) print(out io.Writer) error {
	state := s.State
	if s.StoppedBy != "" {
		state += " by: " + s.StoppedBy
	}
	if s.State == "starting" {
		fmt.Fprintf(out, "%s: starting\n", onLine(s.RunDir))
		for _, ws := range s.Workers {
			if ws.Call != "" {
				fmt.Fprintf(out, "worker %s  %s\n", ws.name(), ws.waits())
			}
		}
		return nil
	}
	fmt.Fprintf(out, "%s: %s, %s\n", onLine(s.RunDir), onLine(s.Program), state)
	line := fmt.Sprintf("step %d of %d", s.Step, s.Steps)
	if s.Loss != nil {
		line += fmt.Sprintf(", loss %.4f", *s.Loss)
	}
	if s.ValLoss != nil {
		line += fmt.Sprintf(", val_loss %.4f", *s.ValLoss)
	}
	fmt.Fprintln(out, line)
	for _, b := range s.Lineage {
		var what []string
		for _, c := range b.Changed {
			what = append(what, c.String())
		}
		fmt.Fprintf(out, "changed after step %d: %s\n", b.Until, strings.Join(what, "; "))
	}
	if s.Plan != "" {
		fmt.Fprintf(out, "plan %s, %s\n", s.Plan, s.Reason)
	}
	if s.DiskFull != "" {
		fmt.Fprintf(out, "%s, since %s\n", s.DiskFull, s.DiskFullSince.Format(time.TimeOnly))
	}
	if s.DataBound != "" {
		fmt.Fprintf(out, "%s, since %s\n", s.DataBound, s.DataBoundSince.Format(time.TimeOnly))
	}
	if s.Unsaved != "" {
		fmt.Fprintln(out, s.Unsaved)
	}
	if s.WorkersLost > 0 {
		line := fmt.Sprintf("workers lost: %d", s.WorkersLost)
		if s.Recoveries > 0 {
			line += fmt.Sprintf(", recoveries: %d, the last in %.1f ms", s.Recoveries, s.RecoveryMS)
		}
		fmt.Fprintln(out, line)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, ws := range s.Workers {
		if ws.Gone != "" && ws.Forwards == nil {
			fmt.Fprintf(w, "worker %d\tgone\t%s\n", ws.ID, ws.Gone)
			continue
		}
		fmt.Fprintf(w, "worker %s\tstages %s\tlayers %s", ws.name(), plan.Ranges(ws.Stages, ","), plan.Ranges(ws.Layers, ","))
		if ws.Forwards != nil {
			fmt.Fprintf(w, "\t%d forwards\t%d backwards", *ws.Forwards, *ws.Backwards)
		}
		if ws.Gone != "" {
			fmt.Fprintf(w, "\t%s", ws.Gone)
		}
		if ws.Call != "" {
			fmt.Fprintf(w, "\t%s", ws.waits())
		}
		if ws.Ring != "" && ws.Ring != "alive" {
			fmt.Fprintf(w, "\tthe ring says: %s", ws.Ring)
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

// waits says which call the worker waits for.
func (s WorkerStatus) waits() string {
	since, _ := time.Parse(time.RFC3339, s.Since)
	return fmt.Sprintf("%s has not returned for %.0f s", s.Call, time.Since(since).Seconds())
}

// name is the worker's number, with its incarnation behind a point where that is not the first,
// as in the names of log files.
func (s WorkerStatus) name() string {
	if s.Life == 0 {
		return strconv.Itoa(s.ID)
	}
	return fmt.Sprintf("%d.%d", s.ID, s.Life)
}
