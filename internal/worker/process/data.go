package process

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/find"
)

// sources asks the agent for data files that are on other machines of the run. It implements [find.Elsewhere] for all sessions of a
// process.
type sources struct {
	first *Worker

	mu    sync.Mutex
	last  uint64
	waits map[uint64]chan control.Got
}

// say sends to the agent, whichever session the worker is in.
func (s *sources) say(m control.Message) error {
	w := s.first
	for {
		for next := w.successor(); next != nil; next = w.successor() {
			w = next
		}
		if err := w.send(m); !errors.Is(err, errFenced) {
			return err
		}
	}
}

// Found implements [find.Elsewhere].
func (s *sources) Found(patterns []string) error {
	folder, err := os.Getwd()
	if err != nil {
		return nil // the patterns mean nothing on another machine, as far as one can tell
	}
	m := control.Sources{Folder: folder}
	for i, p := range patterns {
		if len(p) <= control.MaxPattern {
			m.Patterns = append(m.Patterns, p)
		}
		if n := len(m.Patterns); n == control.MaxPatterns || n > 0 && i == len(patterns)-1 {
			if err := s.say(m); err != nil {
				return err
			}
			m.Patterns = nil
		}
	}
	return nil
}

// Get implements [find.Elsewhere].
func (s *sources) Get(pattern string, none *find.Error) (files []find.File, err error) {
	s.mu.Lock()
	s.last++
	id, came := s.last, make(chan control.Got, 1)
	s.waits[id] = came
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waits, id)
	}()
	calls := s.first.calls
	defer calls.Leave(calls.Enter(control.NoCall, 0, 0)) // the job does not run while it waits for other machines
	if err := s.say(control.Note{Text: fmt.Sprintf("getting %.200s from another machine", pattern)}); err != nil {
		return nil, err
	}
	if err := s.say(control.Lacks{ID: id, Pattern: pattern}); err != nil {
		return nil, err
	}
	for {
		got := <-came // the process ends without its agent
		switch {
		case got.None && got.Err == "":
			return nil, none
		case got.None:
			return nil, &find.Error{Path: none.Path, Reason: fmt.Sprintf("%s, %s", none.Reason, got.Err)}
		case got.Err != "":
			return nil, &find.Error{Path: none.Path, Reason: fmt.Sprintf("%s, and it cannot be copied from another machine: %s", none.Reason, got.Err)}
		}
		for _, f := range got.Files {
			files = append(files, find.File(f))
		}
		if !got.More {
			return files, nil
		}
	}
}

// put takes in an answer of the agent.
func (s *sources) put(m control.Got) {
	s.mu.Lock()
	came := s.waits[m.ID]
	s.mu.Unlock()
	if came != nil {
		came <- m
	}
}
