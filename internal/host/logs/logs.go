// Package logs reads the logs of workers on other hosts: while a run goes on, as a command asks for them, and at its end, when the leader
// gathers them for all hosts.
package logs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// Read answers another host about the logs in a run directory.
func Read(dir string, m control.ReadLog) (l control.Logged) {
	logs, err := rundir.Logs(dir)
	for _, log := range logs {
		switch {
		case m.Worker < 0 && len(l.Logs) < control.MaxLogs:
			if info, err := os.Stat(log.Path); err == nil {
				l.Logs = append(l.Logs, control.LogFile{Worker: log.Worker, Incarnation: log.Incarnation, Size: info.Size()})
			}
		case m.Worker == log.Worker && m.Incarnation == log.Incarnation:
			l.Data, err = readAt(log.Path, m.At)
		}
	}
	if err != nil {
		l.Err = line(err.Error())
	}
	return l
}

func readAt(path string, at int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, control.MaxLogged)
	n, err := f.ReadAt(b, at)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return b[:n], err
}

// Hosts are the other hosts of a run.
type Hosts struct {
	// Dial connects to one.
	Dial func(ctx context.Context, host string) (*control.Conn, error)
}

// Ask asks a host.
func (h Hosts) Ask(ctx context.Context, host string, m control.ReadLog) control.Logged {
	ctx, cancel := context.WithTimeout(ctx, timing.Logs)
	defer cancel()
	fail := func(err error) control.Logged {
		return control.Logged{Err: fmt.Sprintf("%s: its logs cannot be read: %s", host, line(err.Error()))}
	}
	m.Protocol, m.Host = control.Protocol, host
	conn, err := h.Dial(ctx, host)
	if err != nil {
		return fail(err)
	}
	defer conn.Close()
	if err := conn.Send(m); err != nil {
		return fail(err)
	}
	said, err := conn.Receive(ctx)
	if err != nil {
		return fail(err)
	}
	l, ok := said.(control.Logged)
	if !ok || len(l.Logs) > control.MaxLogs || len(l.Data) > control.MaxLogged {
		return fail(fmt.Errorf("it answers with %T", said))
	}
	if l.Err != "" {
		return fail(errors.New(l.Err))
	}
	for i := range l.Logs {
		x := &l.Logs[i]
		if x.Worker < 0 || x.Incarnation < 0 || x.Size < 0 {
			return fail(fmt.Errorf("worker %d has a log of %d bytes", x.Worker, x.Size))
		}
		x.Host = host
	}
	return l
}

// List asks hosts which logs they have.
func (h Hosts) List(ctx context.Context, hosts []string) (sum control.Logged) {
	all := make([]control.Logged, len(hosts))
	var asking sync.WaitGroup
	for i, host := range hosts {
		asking.Go(func() { all[i] = h.Ask(ctx, host, control.ReadLog{Worker: -1}) })
	}
	asking.Wait()
	var faults []string
	for _, x := range all {
		sum.Logs = append(sum.Logs, x.Logs...)
		if x.Err != "" {
			faults = append(faults, x.Err)
		}
	}
	sum.Logs, sum.Err = sum.Logs[:min(len(sum.Logs), control.MaxLogs)], strings.Join(faults, "\n")
	return sum
}

// Gather returns the ends of the logs of this host, self, whose run directory is dir, and of other ones. Those that have gone are noted.
// It takes [timing.Logs] at most.
func (h Hosts) Gather(ctx context.Context, dir, self string, others, gone []string) (o rundir.Others) {
	ctx, cancel := context.WithTimeout(ctx, timing.Logs)
	defer cancel()
	for _, host := range gone {
		o.Notes = append(o.Notes, host+": its logs are in its own run directory: it was lost, or had left, when the run ended")
	}
	found := h.List(ctx, others)
	if found.Err != "" {
		o.Notes = append(o.Notes, strings.Split(found.Err, "\n")...)
	}
	for _, l := range Read(dir, control.ReadLog{Worker: -1}).Logs {
		l.Host = self
		found.Logs = append(found.Logs, l)
	}
	slices.SortFunc(found.Logs, func(a, b control.LogFile) int {
		return cmp.Or(a.Worker-b.Worker, a.Incarnation-b.Incarnation, strings.Compare(a.Host, b.Host))
	})
	shares := share(found.Logs, rundir.MaxOthers)
	o.Logs = make([]rundir.OtherLog, len(found.Logs))
	notes := make([]string, len(others)+1)
	var reading sync.WaitGroup
	for i, host := range append(slices.Clone(others), self) {
		ask := func(m control.ReadLog) control.Logged { return h.Ask(ctx, host, m) }
		if host == self {
			ask = func(m control.ReadLog) control.Logged { return Read(dir, m) }
		}
		reading.Go(func() {
			for j, l := range found.Logs {
				if l.Host == host && notes[i] == "" {
					o.Logs[j], notes[i] = end(l, shares[j], ask)
				}
			}
		})
	}
	reading.Wait()
	o.Logs = slices.DeleteFunc(o.Logs, func(l rundir.OtherLog) bool { return l.Host == "" })
	o.Notes = append(o.Notes, slices.DeleteFunc(notes, func(n string) bool { return n == "" })...)
	return o
}

// end reads the end of a log, which may be shorter by then.
func end(l control.LogFile, size int64, ask func(control.ReadLog) control.Logged) (o rundir.OtherLog, note string) {
	o = rundir.OtherLog{Host: l.Host, Worker: l.Worker, Incarnation: l.Incarnation, From: l.Size - size}
	for int64(len(o.Text)) < size {
		part := ask(control.ReadLog{Worker: l.Worker, Incarnation: l.Incarnation, At: o.From + int64(len(o.Text))})
		if part.Err != "" {
			return o, part.Err
		}
		if len(part.Data) == 0 {
			break
		}
		o.Text = append(o.Text, part.Data[:min(int64(len(part.Data)), size-int64(len(o.Text)))]...)
	}
	return o, ""
}

// share returns how much of each log there is room for: all of the short ones, and as much of each long one.
func share(logs []control.LogFile, room int64) []int64 {
	order := make([]int, len(logs))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(logs[a].Size, logs[b].Size) })
	shares := make([]int64, len(logs))
	for k, i := range order {
		shares[i] = min(max(logs[i].Size, 0), room/int64(len(order)-k))
		room -= shares[i]
	}
	return shares
}

func line(s string) string { return strings.Join(strings.Fields(s), " ") }
